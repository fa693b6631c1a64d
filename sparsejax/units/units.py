"""What is summed: units, and where an exchange finds their values.

A unit is what an index points at: one element, or one row of a table. A scheme takes
`Units`, and asks for a dense array only where it has to add up in one. `Dense` and
`Entries` are units.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.types import varying_axes


Places = Callable[[jax.Array, jax.Array], jax.Array]


class Source(NamedTuple):
    """The array in which the values of a part's slots are found.

    Attributes:
        array: [units, ...], the values.
        dtype: Of the values while they travel; that of the array if None.
        units: From the number of a part and slots int32 [k] of it, or from those of all,
            int32 [parts, 1] and [parts, k], to the units whose values they have; the slots
            themselves if None. It may name any unit for a slot beyond a part's count.
        names: From the same to the numbers that are sent instead of the slots, in messages
            whose only code is "coo32"; the slots themselves if None.
    """

    array: jax.Array
    dtype: jax.typing.DTypeLike | None = None
    units: Places | None = None
    names: Places | None = None

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes over which the values vary."""
        return varying_axes(self.array)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one value."""
        return self.array.shape[1:]

    def read(self, units: jax.Array) -> jax.Array:
        """The values of units, in the dtype of the array."""
        return self.array.at[units].get(mode="clip", wrap_negative_indices=False)

    @property
    def wire_dtype(self) -> jnp.dtype:
        """The dtype of the values while they travel."""
        return jnp.dtype(self.dtype or self.array.dtype)


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

    @property
    def coded(self) -> Any:
        """The values as `CodedValues`, in the order of `stored`; None if in no code."""
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


def wide(dtype: Any) -> jnp.dtype:
    """The dtype in which numbers of this one are added up and kept: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Numbers in the gradient's dtype; finite ones stay finite."""
    if jnp.dtype(dtype) == x.dtype:
        return x
    most = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), x).astype(dtype)


def unit_bytes(x: Any, dtype: Any) -> int:
    """Bytes of one unit of x [units, ...] where its numbers travel in a dtype."""
    return x.size // x.shape[0] * jnp.dtype(dtype).itemsize
