"""The contract of a value code: values in 1 to 32 bits, and a table for each leaf.

For each leaf a rank sends a code for each value, and one table of float32 numbers, from
which every rank decodes the values. So decoded values are equal on all ranks. The sender
decodes them, too, and keeps the rounding errors, so nothing is lost.

In messages of codes alone, codes of fewer than 8 bits are sent as bit planes, and wider
codes as they are in memory. In messages with slots they are sent as
`messages.CodedMessages` describes.

Tests require of every code in `codes.CODES`:

* Values that are not `real` do not influence the table.
* A leaf of zeros is decoded to zeros.
* Floating dtypes of 16 bits or more send NaN and infinity unchanged. In other codes these
  make the table, and all decoded values of the leaf, not finite.
* Numbers near the limits of float32 have the codes of the same numbers scaled to its
  middle: sums are taken over the results of `in_units`.
* Decoded values equal those that NumPy computes in float64: `QUANTIZED` in
  `tests/chunked/reference.py`.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.units import bits
from sparsejax.wire.value_codes import planes


@dataclasses.dataclass(frozen=True)
class ValueCode(abc.ABC):
    """A way to write selected values in few bits.

    Attributes:
        bits: The number of bits of a code.
        table: The number of float32 numbers in the table of a leaf.
    """

    bits: int
    table: int

    @abc.abstractmethod
    def encode(
        self, x: jax.Array, real: jax.Array | bool = True
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the codes, uint32 [n], and the table, float32 [table], of the values.

        Args:
            x: float32 [n], n > 0, the values.
            real: Booleans [n], which elements of x are values. Other elements also have a
                code, but do not influence the table.
        """

    @abc.abstractmethod
    def decode(self, codes: jax.Array, table: jax.Array) -> jax.Array:
        """Returns the values of codes and their table, float32 [n].

        Args:
            codes: uint32 [n].
            table: float32 [table], or [table, n] where each value has a table of its own.
        """

    def words(self, entries: int) -> int:
        """Returns the words of 32 bits for the codes of `entries` values."""
        if self.bits < 8:
            return planes.plane_words(entries, self.bits)
        return -(-entries * self.bits // bits.WORD)

    def pack(self, codes: jax.Array) -> jax.Array:
        """Packs codes, uint32 [n], into words, uint32 [words(n)]."""
        if self.bits < 8:
            return planes.pack_planes(codes, self.bits)
        return bits.words_of(codes.astype(self.dtype))

    def unpack(self, words: jax.Array, entries: int) -> jax.Array:
        """Unpacks words into the codes of `entries` values; inverts `pack`."""
        if self.bits < 8:
            return planes.unpack_planes(words, self.bits, entries)
        return bits.rows_of(words, self.dtype, entries).astype(jnp.uint32)

    @property
    def dtype(self) -> jnp.dtype:
        """The narrowest dtype that holds a code."""
        return jnp.dtype(_UNSIGNED[max(self.bits, 8)])


_UNSIGNED: dict[int, Any] = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def largest(x, real):
    """Returns the largest magnitude of the values that are real, or 0."""
    return jnp.max(jnp.abs(x), initial=0, where=real)


def in_units(x, real):
    """Divides numbers by a power of two near the largest; returns them and that power.

    So sums of numbers near the limits of float32, and of their squares, do not overflow.
    """
    exponent = lax.bitcast_convert_type(largest(x, real), jnp.uint32) >> 23
    # The inverses of the smallest and of the largest powers are not normal numbers.
    exponent = jnp.clip(exponent, 2, 252)
    power = lambda exponent: lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return x * power(254 - exponent), power(exponent)


def count(x, flags):
    """Returns the number of flagged elements of x, as float32."""
    return jnp.sum(jnp.broadcast_to(flags, x.shape), dtype=jnp.float32)


def mean_where(x, flags):
    """Returns the mean of the flagged elements of x, or 0 if there are none."""
    return jnp.sum(jnp.where(flags, x, 0)) / jnp.maximum(count(x, flags), 1)
