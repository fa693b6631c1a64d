"""Indices of units: their range and dtype, and whether they were changed."""

import weakref

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import checkify

from pallas_kernels.types import same_trace
from sparsejax.errors import ArgumentError


# The index after the last unit is int32, too.
MOST_NUMBERED = 2**31 - 1


def check_numbered(name: str, units: int) -> None:
    """Raises if there are more units than int32 can number."""
    if units > MOST_NUMBERED:
        raise ArgumentError(
            f"{name}: {units:,} units are too many: they are numbered by int32, which goes "
            f"to {MOST_NUMBERED:,}. Use rows as units, split the array, or shard it over a "
            "second mesh axis."
        )


def comparable(indices: jax.Array) -> jax.Array:
    """Casts narrow indices to int32: an int8 cannot be compared with 300, for example."""
    return indices.astype(jnp.int32) if indices.dtype.itemsize < 4 else indices


def check_in_range(indices: jax.Array, size: int, name: str, meaning: str) -> None:
    """Reports indices out of [0, size] under checkify; otherwise it does nothing.

    Args:
        indices: Integers.
        size: The number of units.
        name: The name of the indices, for the message.
        meaning: The meaning of the index `size`, for the message.
    """
    indices = comparable(indices)
    message = f"{name} must lie in [0, {size}], where {size} marks {meaning}."
    # The message does not have the indices that are out of range: for each array in a
    # message JAX traverses the whole program that is being traced.
    message = message.replace("{", "{{").replace("}", "}}")
    checkify.debug_check(jnp.all((indices >= 0) & (indices <= size)), message)


def in_range(indices: jax.Array, size: int) -> jax.Array:
    """Casts integers to int32 indices, with `size` for all that are out of range."""
    check_numbered("indices", size)
    indices = comparable(indices)
    # A negative index would count from the end; it is out of range here.
    inside = (indices >= 0) & (indices < size)
    return jnp.where(inside, indices, size).astype(jnp.int32)


class Origin:
    """A reference to the indices that a sparsifier selected, by which changes are found.

    All origins compare equal, so that they do not influence comparisons of trees.
    """

    def __init__(self, indices: jax.Array | None = None):
        self._indices = None if indices is None else weakref.ref(indices)
        self._is_concrete = indices is not None and not isinstance(indices, Tracer)

    def __eq__(self, other):
        return isinstance(other, Origin)

    def __hash__(self):
        return hash(Origin)

    def __deepcopy__(self, memo):
        return Origin()

    def __reduce__(self):
        return Origin, ()

    def __repr__(self):
        return "Origin()"

    def is_changed(self, indices: jax.Array) -> bool:
        """Returns whether `indices` are others than the selected ones.

        If the selected ones belong to another trace, such as that outside of a branch, this
        is unknown, and the result is False.
        """
        first = self._indices() if self._indices else None
        if first is None:  # outside of `jit` the selected ones may be gone already
            return self._is_concrete and not isinstance(indices, Tracer)
        return first is not indices and same_trace(first, indices)
