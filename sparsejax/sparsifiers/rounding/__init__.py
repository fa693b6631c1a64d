"""Sparsifiers that send another array of the same shape: what they take off comes back."""
