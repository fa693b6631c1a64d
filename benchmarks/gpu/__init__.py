"""Checks and measurements on a GPU; `python -m benchmarks.gpu` runs them all."""
