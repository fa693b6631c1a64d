"""What is summed: units given densely or by entries, and who owns them."""
