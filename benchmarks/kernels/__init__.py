"""Benchmarks of the work of one device: kernels and sparsifiers."""
