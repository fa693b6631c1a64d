"""Checks of arguments before a launch. Their messages name the fix."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.errors import KernelArgumentError


LIMIT = 2**31


def vector(name: str, x: Any) -> None:
    """Raises unless x is a vector whose elements int32 can number."""
    shape = list(jnp.shape(x))
    if len(shape) != 1:
        raise KernelArgumentError(
            f"{name} must be a vector, got shape {shape}; reshape it to [-1] first."
        )
    if shape[0] >= LIMIT:
        raise KernelArgumentError(
            f"{name} has {shape[0]:,} elements, more than int32 numbers (2^31 - 1). Take "
            "rows for units: a table of [rows, width] has an index a row."
        )


def floats(name: str, x: Any) -> None:
    """Raises unless x is a vector of a floating dtype."""
    vector(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise KernelArgumentError(
            f"{name} must be of a floating dtype, got {x.dtype}; cast it first."
        )


def integers(name: str, x: Any) -> None:
    """Raises unless x is a vector of int32."""
    vector(name, x)
    if x.dtype != jnp.int32:
        raise KernelArgumentError(
            f"{name} must be int32, got {x.dtype}; cast with {name}.astype(jnp.int32)."
        )


def words(name: str, x: Any) -> None:
    """Raises unless x is a vector of uint32 whose bits int32 can number."""
    vector(name, x)
    if x.dtype != jnp.uint32:
        raise KernelArgumentError(f"{name} must be uint32, got {x.dtype}.")
    if 32 * x.shape[0] >= LIMIT:
        raise KernelArgumentError(
            f"{name} has {x.shape[0]:,} words, more bits than int32 can number."
        )


def positive(name: str, value: Any, why: str = "") -> None:
    """Raises unless the value is a Python int of at least 1."""
    if isinstance(value, jax.Array):
        raise KernelArgumentError(
            f"{name} decides what is compiled, so it must be a Python int, and not traced; "
            "name it in static_argnames of jax.jit."
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise KernelArgumentError(f"{name} must be a positive int, got {value!r}.{why}")


def entries(values: Any, keys: Any, name: str) -> None:
    """Raises unless there is a value, or a row of values, for each key."""
    if values.shape[:1] != keys.shape:
        raise KernelArgumentError(
            f"values of shape {list(values.shape)} do not fit {keys.shape[0]} {name}."
        )


def places(what: str, count: int) -> None:
    """Raises if there are more places than int32 can number."""
    if count >= LIMIT:
        raise KernelArgumentError(
            f"{what} are {count:,} places, more than int32 can number."
        )
