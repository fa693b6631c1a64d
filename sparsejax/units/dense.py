"""A dense array as units, with flags of the units that may be non-zero, if known."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.types import varying_axes
from sparsejax.units import bits
from sparsejax.units.units import Places, Source


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("array", "flags"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class Dense:
    """A dense array.

    Attributes:
        array: [units, ...].
        flags: Booleans [units], without which units are zero; None if not known.
    """

    array: jax.Array
    flags: jax.Array | None = None

    coded = None

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
        """The number of numbers of the array."""
        return math.prod(self.shape)

    @property
    def capacity(self) -> int:
        """The largest number of units that may be non-zero: all."""
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
        """Returns booleans [units]; units without a flag are zero."""
        return bits.nonzero_units(self.array) if self.flags is None else self.flags

    def dense(self) -> jax.Array:
        """Returns the array itself."""
        return self.array

    def source(
        self, dtype: jax.typing.DTypeLike | None = None, units: Places | None = None
    ) -> Source:
        """Returns the source of the values of slots for an exchange."""
        return Source(self.array, dtype, units)
