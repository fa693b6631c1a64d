"""The public operations: their arguments and results, and the backends of each."""
