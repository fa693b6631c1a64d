"""How the values of selected entries travel: in 1 to 32 bits, and a table for each leaf.

    float32     32 bits, as they are
    bfloat16    16 bits, float16 too: rounded
    int8        8 bits, and the step: the largest magnitude of the leaf over 127
    fp8         8 bits, float8_e4m3fn, and a scale: the largest magnitude over 448
    2bit        the sign, and whether the magnitude is above the mean one; the table has
                the mean of the magnitudes below, and of those above
    2bit-bins   SparseLoCo's: four bins of 1.5 standard deviations around the mean; the
                table has the mean of the values in each
    sign        the sign; the table has the mean magnitude

Codes of fewer than 8 bits travel as planes of bits, wider ones as they lie in memory. In 16
bits or more NaN and infinity travel as they are. In fewer they make the table not finite,
and with it values of the whole leaf. Decoded values are the same on all ranks, the sender
included, which keeps what a code takes off.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import arguments
from sparsejax.chunked import indices
from sparsejax.state import tree
from sparsejax.units import bits


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
        self, x: jax.Array, counted: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The codes and the table of some values.

        Args:
            x: float32 [n], n > 0.
            counted: Flags [n] of those of which the table is made; all if None.

        Returns:
            uint32 [n], and float32 [table].
        """

    @abc.abstractmethod
    def decode(self, codes: jax.Array, table: jax.Array) -> jax.Array:
        """The values that codes and their table stand for, float32 [n]."""

    def words(self, entries: int) -> int:
        """Words of 32 bits for the codes of `entries` values."""
        if self.width < 8:
            return indices.plane_words(entries, self.width)
        return -(-entries * self.width // bits.WORD)

    def pack(self, codes: jax.Array) -> jax.Array:
        """The codes as words."""
        if self.width < 8:
            return indices.pack_planes(codes, self.width)
        return bits.words_of(codes.astype(_UNSIGNED[self.width]))

    def unpack(self, words: jax.Array, entries: int) -> jax.Array:
        """Inverse of `pack`."""
        if self.width < 8:
            return indices.unpack_planes(words, self.width, entries)
        codes = bits.rows_of(words, jnp.dtype(_UNSIGNED[self.width]), entries)
        return codes.astype(jnp.uint32)


_UNSIGNED: dict[int, Any] = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


@dataclasses.dataclass(frozen=True)
class _Rounded(ValueCode):
    """A floating dtype; finite values stay finite.

    Attributes:
        dtype: The dtype.
    """

    dtype: str

    def encode(self, x, counted=None):
        del counted
        codes = lax.bitcast_convert_type(
            tree.rounded(x, jnp.dtype(self.dtype)), _UNSIGNED[self.width]
        )
        return codes.astype(jnp.uint32), jnp.zeros(0, jnp.float32)

    def decode(self, codes, table):
        del table
        narrow = codes.astype(_UNSIGNED[self.width])
        return lax.bitcast_convert_type(narrow, jnp.dtype(self.dtype)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Int8(ValueCode):
    """Whole steps; 128 is zero."""

    def encode(self, x, counted=None):
        step = _largest(x, counted) / 127
        steps = jnp.round(x / jnp.where(step > 0, step, 1))
        steps = jnp.where(jnp.isfinite(steps), jnp.clip(steps, -127, 127), 127)
        return (steps + 128).astype(jnp.uint32), step[None]

    def decode(self, codes, table):
        return (codes.astype(jnp.float32) - 128) * table[0]


@dataclasses.dataclass(frozen=True)
class _Float8(ValueCode):
    """float8_e4m3fn, which ends at 448 and has no infinity."""

    def encode(self, x, counted=None):
        scale = _largest(x, counted) / 448
        scaled = jnp.clip(x / jnp.where(scale > 0, scale, 1), -448, 448)
        codes = lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8)
        return codes.astype(jnp.uint32), scale[None]

    def decode(self, codes, table):
        narrow = codes.astype(jnp.uint8)
        x = lax.bitcast_convert_type(narrow, jnp.float8_e4m3fn).astype(jnp.float32)
        return x * table[0]


@dataclasses.dataclass(frozen=True)
class _TwoLevels(ValueCode):
    """Bit 0 is the sign, bit 1 says that the magnitude is above the mean one."""

    def encode(self, x, counted=None):
        x, unit = _in_units(x, counted)
        magnitude = jnp.abs(x)
        # The comparison with NaN is never true: the lower mean has all of them.
        above = magnitude > jnp.mean(magnitude, where=counted)
        means = [_mean_where(magnitude, flags, counted) for flags in (~above, above)]
        codes = (x < 0).astype(jnp.uint32) | above.astype(jnp.uint32) << 1
        return codes, jnp.stack(means) * unit

    def decode(self, codes, table):
        level = jnp.where((codes & 2) != 0, table[1], table[0])
        return jnp.where((codes & 1) != 0, -level, level)


@dataclasses.dataclass(frozen=True)
class _FourBins(ValueCode):
    """The number of the bin."""

    def encode(self, x, counted=None):
        x, unit = _in_units(x, counted)
        mean = jnp.mean(x, where=counted)
        count = x.size if counted is None else jnp.sum(counted, dtype=jnp.float32)
        squares = jnp.sum(jnp.square(x - mean), where=counted)
        spread = jnp.sqrt(squares / jnp.maximum(count - 1, 1))
        width = 6 * spread / 4
        bins = jnp.round((x - mean) / jnp.where(width > 0, width, 1) + 2)
        bins = jnp.where(jnp.isfinite(bins), jnp.clip(bins, 0, 3), 3).astype(jnp.uint32)
        means = [_mean_where(x, bins == i, counted) for i in range(4)]
        return bins, jnp.stack(means) * unit

    def decode(self, codes, table):
        low = jnp.where((codes & 1) != 0, table[1], table[0])
        high = jnp.where((codes & 1) != 0, table[3], table[2])
        return jnp.where((codes & 2) != 0, high, low)


@dataclasses.dataclass(frozen=True)
class _OneLevel(ValueCode):
    """Whether a value is negative."""

    def encode(self, x, counted=None):
        x, unit = _in_units(x, counted)
        mean = jnp.mean(jnp.abs(x), where=counted)
        return (x < 0).astype(jnp.uint32), mean[None] * unit

    def decode(self, codes, table):
        return jnp.where(codes != 0, -table[0], table[0])


CODES: dict[str, ValueCode] = {
    "float32": _Rounded(32, 0, "float32"),
    "bfloat16": _Rounded(16, 0, "bfloat16"),
    "float16": _Rounded(16, 0, "float16"),
    "int8": _Int8(8, 1),
    "fp8": _Float8(8, 1),
    "2bit": _TwoLevels(2, 2),
    "2bit-bins": _FourBins(2, 4),
    "sign": _OneLevel(1, 1),
}


def code_of(name: Any) -> ValueCode:
    """The code of a name; raises where there is none."""
    arguments.check_one_of("values", name, CODES)
    return CODES[name]


def _largest(x, counted):
    """The largest of the magnitudes that count."""
    return jnp.max(jnp.abs(x), initial=0, where=counted)


def _in_units(x, counted):
    """Numbers as multiples of a power of two near the largest, and that power.

    So sums of numbers near the end of float32, and of their squares, do not overflow.
    """
    exponent = lax.bitcast_convert_type(_largest(x, counted), jnp.uint32) >> 23
    # Of the smallest and the largest powers the inverse would be no normal number.
    exponent = jnp.clip(exponent, 2, 252)
    power = lambda exponent: lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return x * power(254 - exponent), power(exponent)


def _mean_where(x, flags, counted):
    """The mean of the flagged numbers that count, 0 of none."""
    flags = flags if counted is None else flags & counted
    count = jnp.sum(flags, dtype=jnp.float32)
    return jnp.sum(jnp.where(flags, x, 0)) / jnp.maximum(count, 1)
