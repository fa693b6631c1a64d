"""Sparsifiers that select the same elements on all ranks, so that no indices are sent."""
