"""Schemes and sparsifiers as optax transformations."""
