"""The contract of a value code: a selected value in 1 to 32 bits, and a table a leaf.

For a leaf a rank sends a code for each value, and one table of float32 numbers, from which
any rank decodes them. So decoded values are the same on all ranks, the sender included,
which keeps what a code takes off: nothing is lost.

In a message of their own codes of fewer than 8 bits travel as planes of bits, wider ones as
they lie in memory; beside slots they travel as `messages.CodedMessages` says.

Of every code in `codes.CODES` tests demand:

* Values that are not `real` have no part in the table.
* Of a leaf of zeros come zeros.
* NaN and infinity travel as they are in a floating dtype. Another code makes the table not
  finite with them, and the values at their places; others of the leaf may be, too.
* Numbers near the ends of float32 have the codes of the same numbers in the middle: a sum
  is of `in_units`.
* What is decoded is what NumPy computes in float64: `QUANTIZED` in
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
    """A way for values to travel.

    Attributes:
        width: Bits of a value.
        table: float32 numbers for each leaf.
    """

    width: int
    table: int

    @abc.abstractmethod
    def encode(
        self, x: jax.Array, real: jax.Array | bool = True
    ) -> tuple[jax.Array, jax.Array]:
        """The codes uint32 [n] and the table float32 [table] of float32 [n], n > 0.

        Args:
            x: The values.
            real: Booleans [n]: where there is a value. Others have a code, and no part in
                the table.
        """

    @abc.abstractmethod
    def decode(self, codes: jax.Array, table: jax.Array) -> jax.Array:
        """The values that codes and their table stand for, float32 [n].

        Args:
            codes: uint32 [n].
            table: float32 [table], or [table, n] where each value has a table of its own.
        """

    def words(self, entries: int) -> int:
        """Words of 32 bits for the codes of `entries` values."""
        if self.width < 8:
            return planes.plane_words(entries, self.width)
        return -(-entries * self.width // bits.WORD)

    def pack(self, codes: jax.Array) -> jax.Array:
        """The codes as words."""
        if self.width < 8:
            return planes.pack_planes(codes, self.width)
        return bits.words_of(codes.astype(self.dtype))

    def unpack(self, words: jax.Array, entries: int) -> jax.Array:
        """Inverse of `pack`."""
        if self.width < 8:
            return planes.unpack_planes(words, self.width, entries)
        return bits.rows_of(words, self.dtype, entries).astype(jnp.uint32)

    @property
    def dtype(self) -> jnp.dtype:
        """The narrowest dtype that holds a code."""
        return jnp.dtype(_UNSIGNED[max(self.width, 8)])


_UNSIGNED: dict[int, Any] = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def largest(x, real):
    """The largest magnitude of a value."""
    return jnp.max(jnp.abs(x), initial=0, where=real)


def in_units(x, real):
    """Numbers as multiples of a power of two near the largest, and that power.

    So sums of numbers near the end of float32, and of their squares, do not overflow.
    """
    exponent = lax.bitcast_convert_type(largest(x, real), jnp.uint32) >> 23
    # Of the smallest and the largest powers the inverse would be no normal number.
    exponent = jnp.clip(exponent, 2, 252)
    power = lambda exponent: lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return x * power(254 - exponent), power(exponent)


def count(x, flags):
    """How many numbers are flagged, in float32."""
    return jnp.sum(jnp.broadcast_to(flags, x.shape), dtype=jnp.float32)


def mean_where(x, flags):
    """The mean of the flagged numbers, 0 of none."""
    return jnp.sum(jnp.where(flags, x, 0)) / jnp.maximum(count(x, flags), 1)
