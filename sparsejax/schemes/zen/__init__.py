"""Zen: its two optima, and the choice between them."""
