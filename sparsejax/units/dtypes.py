"""Dtypes in which numbers are added up and travel, and of integers that number units."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from sparsejax.errors import ArgumentError


# The index behind the last unit is int32, too.
MOST_NUMBERED = 2**31 - 1


def wide(dtype: Any) -> jnp.dtype:
    """The dtype in which numbers of this one are added up and kept: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def unit_bytes(x: Any, dtype: Any) -> int:
    """Bytes of one unit of x [units, ...] where its numbers travel in a dtype."""
    return x.size // x.shape[0] * jnp.dtype(dtype).itemsize


def check_numbered(name: str, units: int) -> None:
    """Raises if units are more than int32 numbers."""
    if units > MOST_NUMBERED:
        raise ArgumentError(
            f"{name}: {units:,} units are too many: they are numbered by int32, which goes "
            f"to {MOST_NUMBERED:,}. Use rows as units, or shard the array over a second "
            "mesh axis."
        )


def comparable(indices: jax.Array) -> jax.Array:
    """Indices of at least 32 bits: narrower ones cannot be compared with 300, say."""
    return indices.astype(jnp.int32) if indices.dtype.itemsize < 4 else indices


def check_in_range(indices: jax.Array, size: int, name: str, meaning: str) -> None:
    """Reports indices out of [0, size] under checkify; else it is no check.

    Args:
        indices: Integers.
        size: How many units there are.
        name: What the indices are, for the message.
        meaning: What `size` marks, for the message.
    """
    indices = comparable(indices)
    message = f"{name} must lie in [0, {size}], where {size} marks {meaning}."
    # Without the numbers that are out of range: each array that a message is given makes
    # JAX walk through the whole program that is being traced.
    message = message.replace("{", "{{").replace("}", "}}")
    checkify.debug_check(jnp.all((indices >= 0) & (indices <= size)), message)


def in_range(indices: jax.Array, size: int) -> jax.Array:
    """Any integers as int32 indices, `size` for all that are out of range."""
    check_numbered("indices", size)
    indices = comparable(indices)
    # A negative index would count from the end; it is out of range here.
    inside = (indices >= 0) & (indices < size)
    return jnp.where(inside, indices, size).astype(jnp.int32)
