"""Gradients to add up: which rows have one, drawn or recorded from training."""
