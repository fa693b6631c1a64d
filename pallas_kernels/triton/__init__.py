"""Kernels in Triton, launched by `launch`. Importing one imports Triton."""
