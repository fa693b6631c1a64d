"""Dtypes in which numbers are added up, and in which they travel."""

from typing import Any

import jax.numpy as jnp


def wide(dtype: Any) -> jnp.dtype:
    """The dtype in which numbers of this one are added up and kept: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def unit_bytes(x: Any, dtype: Any) -> int:
    """Bytes of one unit of x [units, ...] where its numbers travel in a dtype."""
    return x.size // x.shape[0] * jnp.dtype(dtype).itemsize
