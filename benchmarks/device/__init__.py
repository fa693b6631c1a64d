"""Counts what a step does on a GPU, from its compiled program, without a GPU."""
