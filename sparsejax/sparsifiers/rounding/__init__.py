"""Sparsifiers that send another array of the same shape; the rest is the residual."""
