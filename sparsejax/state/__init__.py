"""State of a transformation: trees, what differs by rank, totals, what is pending."""
