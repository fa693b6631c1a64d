"""Kernels in Triton, called by jax-triton. Importing one imports Triton."""
