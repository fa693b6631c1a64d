"""Kernels in Pallas, for GPUs by its Triton backend, and interpreted anywhere."""
