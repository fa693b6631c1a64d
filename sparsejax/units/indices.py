"""Indices of units: integers that number them, and whether they were changed."""

import weakref

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from pallas_kernels.types import same_trace
from sparsejax.errors import ArgumentError


# The index after the last unit is int32, too.
MOST_NUMBERED = 2**31 - 1


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


class Origin:
    """The indices that a sparsifier selected, so that a change of them is noticed.

    All origins are equal: they are part of no comparison of trees.
    """

    def __init__(self, indices: jax.Array | None = None):
        self._indices = None if indices is None else weakref.ref(indices)

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
        """Whether other indices were put in place of the selected ones.

        Where the selected ones are those of another program, as outside of a branch, this
        is unknown, and the answer is no.
        """
        first = self._indices() if self._indices else None
        changed = first is not None and first is not indices
        return changed and same_trace(first, indices)
