"""The protocol of units, and the source in which an exchange finds their values.

A unit is what an index refers to: one element, or one row of a table. A scheme is given
`Units`, and asks for the dense array only if it has to sum in one. `Dense` and `Entries`
implement the protocol.
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
        dtype: The dtype of the values while they travel; that of the array if None.
        units: A function that returns the units, as indices of `array`, of slots. Its
            arguments are the number of a part and its slots, int32 [k]; or those of all
            parts, int32 [parts, 1] and [parts, k]. For slots beyond a part's count it may
            return any unit. If None, slots are units.
        names: A function of the same arguments that returns the numbers that are sent
            instead of the slots, in messages whose only code is "coo32". If None, the slots
            are sent.
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
        """The shape of one value."""
        return self.array.shape[1:]

    def read(self, units: jax.Array) -> jax.Array:
        """Returns the values of units, in the dtype of the array."""
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
        """The number of numbers of the dense array."""
        ...

    @property
    def capacity(self) -> int:
        """The largest number of units that may be non-zero."""
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
        """Booleans [units], the units that the caller listed; None if it listed none."""
        ...

    @property
    def coded(self) -> Any:
        """The `CodedValues`, in the order of `stored`; None if values have no code."""
        ...

    def present(self) -> jax.Array:
        """Returns booleans [units]; units without a flag are zero."""
        ...

    def dense(self) -> jax.Array:
        """Returns the dense array, [units, ...]."""
        ...

    def source(
        self, dtype: jax.typing.DTypeLike | None = None, units: Places | None = None
    ) -> Source:
        """Returns the source of the values of slots for an exchange."""
        ...


def wide(dtype: Any) -> jnp.dtype:
    """Returns the dtype in which numbers of a dtype are summed: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Casts numbers to a dtype; finite numbers are clipped, so that they stay finite."""
    if jnp.dtype(dtype) == x.dtype:
        return x
    most = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), x).astype(dtype)


def unit_bytes(x: Any, dtype: Any) -> int:
    """Returns the bytes of one unit of x [units, ...] with numbers in a dtype."""
    return x.size // x.shape[0] * jnp.dtype(dtype).itemsize
