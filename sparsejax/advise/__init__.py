"""What to use: networks, profiles, plans, and what they forecast."""
