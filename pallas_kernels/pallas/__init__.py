"""Kernels in Pallas, compiled for GPUs by its Triton backend, or interpreted anywhere."""
