"""What is summed: an array, a unit a row, whole or by the units that are there.

A unit is what an index points at: one element, or one row of a table. A scheme takes
`Units`, and asks for a dense array only where it has to add up in one.
"""

import dataclasses
import functools
import math
from typing import Protocol

import jax
import jax.numpy as jnp

from sparsejax.axes import varying_axes
from sparsejax.units import bits
from sparsejax.units.entries import Entries as Entries, Places, Source


class Units(Protocol):
    """An array of units, [units] or [units, ...], on this rank."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dense array."""
        ...

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the values."""
        ...

    @property
    def size(self) -> int:
        """How many numbers the dense array has."""
        ...

    @property
    def capacity(self) -> int:
        """How many units may be non-zero."""
        ...

    @property
    def shared(self) -> bool:
        """Whether the non-zero units are the same on all ranks."""
        ...

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes over which the values vary."""
        ...

    @property
    def flags(self) -> jax.Array | None:
        """Booleans [units], the units that the caller named; None if it named none."""
        ...

    def present(self) -> jax.Array:
        """Booleans [units]: all other units are zero."""
        ...

    def dense(self) -> jax.Array:
        """The dense array, [units, ...]."""
        ...

    def source(
        self, dtype: jax.typing.DTypeLike | None = None, units: Places | None = None
    ) -> Source:
        """The source of the values of slots for an exchange."""
        ...


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("array", "flags"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class Dense:
    """A dense array.

    Attributes:
        array: [units, ...].
        flags: Booleans [units], if the caller knows: all other units are zero.
    """

    array: jax.Array
    flags: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.array.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the values."""
        return jnp.dtype(self.array.dtype)

    @property
    def size(self) -> int:
        """How many numbers the array has."""
        return math.prod(self.shape)

    @property
    def capacity(self) -> int:
        """How many units may be non-zero: all."""
        return self.shape[0]

    @property
    def shared(self) -> bool:
        """Whether the non-zero units are known to be the same on all ranks: no."""
        return False

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes over which the values vary."""
        return varying_axes(self.array)

    def present(self) -> jax.Array:
        """Booleans [units]: all other units are zero."""
        return bits.nonzero_units(self.array) if self.flags is None else self.flags

    def dense(self) -> jax.Array:
        """The array itself."""
        return self.array

    def source(
        self, dtype: jax.typing.DTypeLike | None = None, units: Places | None = None
    ) -> Source:
        """The source of the values of slots for an exchange."""
        return Source(self.array, dtype, units)
