"""Benchmarks of what sparsified gradients do to training."""
