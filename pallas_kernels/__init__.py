"""Kernels for sparse gradients, and `reference`, which defines what each computes.

Depends on JAX alone and knows nothing of networks, so it can be used by itself.
"""
