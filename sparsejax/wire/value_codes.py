"""How the values of selected entries travel: in 1 to 32 bits, and a table for each leaf.

    float32     32 bits, as they are
    bfloat16    16 bits, float16 too: rounded
    int8        8 bits, and the step: the largest magnitude of the leaf over 127
    fp8         8 bits, float8_e4m3fn, and a scale: the largest magnitude over 448
    4bit        the sign, and 0 or a power of two from 1/8 to 8 times the mean magnitude,
                which is the table
    2bit        the sign, and whether the magnitude is above the mean one; the table has
                the mean of the magnitudes below, and of those above
    2bit-bins   SparseLoCo's: four bins of 1.5 standard deviations around the mean; the
                table has the mean of the values in each
    sign        the sign; the table has the mean magnitude

In a message of their own codes of fewer than 8 bits travel as planes of bits, wider ones as
they lie in memory; beside slots they travel as `CodedMessages` says. In 16 bits or more NaN
and infinity travel as they are. In fewer they make the table not finite, and with it values
of the whole leaf. Decoded values are the same on all ranks, the sender included, which
keeps what a code takes off.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import arguments
from sparsejax.units import bits
from sparsejax.units.entries import Entries
from sparsejax.units.indices import MOST_NUMBERED, Origin
from sparsejax.units.slots import Slots
from sparsejax.units.sparse_tensor import CodedValues
from sparsejax.units.units import Source, rounded
from sparsejax.wire.collectives import Wire


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
            return bits.plane_words(entries, self.width)
        return -(-entries * self.width // bits.WORD)

    def pack(self, codes: jax.Array) -> jax.Array:
        """The codes as words."""
        if self.width < 8:
            return bits.pack_planes(codes, self.width)
        return bits.words_of(codes.astype(self.dtype))

    def unpack(self, words: jax.Array, entries: int) -> jax.Array:
        """Inverse of `pack`."""
        if self.width < 8:
            return bits.unpack_planes(words, self.width, entries)
        return bits.rows_of(words, self.dtype, entries).astype(jnp.uint32)

    @property
    def dtype(self) -> jnp.dtype:
        """The narrowest dtype that holds a code."""
        return jnp.dtype(_UNSIGNED[max(self.width, 8)])


_UNSIGNED: dict[int, Any] = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


@dataclasses.dataclass(frozen=True)
class _Rounded(ValueCode):
    """A floating dtype; finite values stay finite.

    Attributes:
        into: The dtype.
    """

    into: str

    def encode(self, x, real=True):
        del real
        narrow = rounded(x, jnp.dtype(self.into))
        codes = lax.bitcast_convert_type(narrow, self.dtype)
        return codes.astype(jnp.uint32), jnp.zeros(0, jnp.float32)

    def decode(self, codes, table):
        del table
        narrow = codes.astype(self.dtype)
        return lax.bitcast_convert_type(narrow, jnp.dtype(self.into)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Int8(ValueCode):
    """Whole steps; 128 is zero."""

    def encode(self, x, real=True):
        step = _largest(x, real) / 127
        steps = jnp.round(x / jnp.where(step > 0, step, 1))
        steps = jnp.where(jnp.isfinite(steps), jnp.clip(steps, -127, 127), 127)
        return (steps + 128).astype(jnp.uint32), step[None]

    def decode(self, codes, table):
        return (codes.astype(jnp.float32) - 128) * table[0]


@dataclasses.dataclass(frozen=True)
class _Float8(ValueCode):
    """float8_e4m3fn, which ends at 448 and has no infinity."""

    def encode(self, x, real=True):
        scale = _largest(x, real) / 448
        scaled = jnp.clip(x / jnp.where(scale > 0, scale, 1), -448, 448)
        codes = lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8)
        return codes.astype(jnp.uint32), scale[None]

    def decode(self, codes, table):
        narrow = codes.astype(jnp.uint8)
        x = lax.bitcast_convert_type(narrow, jnp.float8_e4m3fn).astype(jnp.float32)
        return x * table[0]


@dataclasses.dataclass(frozen=True)
class _Powers(ValueCode):
    """Bit 3 is the sign, the others are an exponent: 4 is the mean magnitude, 0 is zero."""

    def encode(self, x, real=True):
        x, unit = _in_units(x, real)
        magnitude = jnp.abs(x)
        mean = _mean_where(magnitude, real)
        octaves = jnp.log2(magnitude / jnp.where(mean > 0, mean, 1))
        exponent = jnp.clip(jnp.floor(octaves + 4.5), 0, 7)
        exponent = jnp.where(jnp.isfinite(magnitude), exponent, 7).astype(jnp.uint32)
        return exponent | (x < 0).astype(jnp.uint32) << 3, mean[None] * unit

    def decode(self, codes, table):
        exponent = codes & 7
        # 2^(exponent - 4), by the bits of a float32.
        power = lax.bitcast_convert_type((exponent + 123) << 23, jnp.float32)
        magnitude = jnp.where(exponent == 0, 0, table[0] * power)
        return jnp.where((codes & 8) != 0, -magnitude, magnitude)


@dataclasses.dataclass(frozen=True)
class _TwoLevels(ValueCode):
    """Bit 0 is the sign, bit 1 says that the magnitude is above the mean one."""

    def encode(self, x, real=True):
        x, unit = _in_units(x, real)
        magnitude = jnp.abs(x)
        # The comparison with NaN is never true: the lower mean has all of them.
        above = magnitude > _mean_where(magnitude, real)
        means = [_mean_where(magnitude, flags & real) for flags in (~above, above)]
        codes = (x < 0).astype(jnp.uint32) | above.astype(jnp.uint32) << 1
        return codes, jnp.stack(means) * unit

    def decode(self, codes, table):
        level = jnp.where((codes & 2) != 0, table[1], table[0])
        return jnp.where((codes & 1) != 0, -level, level)


@dataclasses.dataclass(frozen=True)
class _FourBins(ValueCode):
    """The number of the bin."""

    def encode(self, x, real=True):
        x, unit = _in_units(x, real)
        mean, count = _mean_where(x, real), _count(x, real)
        squares = jnp.sum(jnp.where(real, jnp.square(x - mean), 0))
        spread = jnp.sqrt(squares / jnp.maximum(count - 1, 1))
        width = 6 * spread / 4
        bins = jnp.round((x - mean) / jnp.where(width > 0, width, 1) + 2)
        bins = jnp.where(jnp.isfinite(bins), jnp.clip(bins, 0, 3), 3).astype(jnp.uint32)
        means = [_mean_where(x, (bins == i) & real) for i in range(4)]
        return bins, jnp.stack(means) * unit

    def decode(self, codes, table):
        low = jnp.where((codes & 1) != 0, table[1], table[0])
        high = jnp.where((codes & 1) != 0, table[3], table[2])
        return jnp.where((codes & 2) != 0, high, low)


@dataclasses.dataclass(frozen=True)
class _OneLevel(ValueCode):
    """Whether a value is negative."""

    def encode(self, x, real=True):
        x, unit = _in_units(x, real)
        return (x < 0).astype(jnp.uint32), _mean_where(jnp.abs(x), real)[None] * unit

    def decode(self, codes, table):
        return jnp.where(codes != 0, -table[0], table[0])


CODES: dict[str, ValueCode] = {
    "float32": _Rounded(32, 0, "float32"),
    "bfloat16": _Rounded(16, 0, "bfloat16"),
    "float16": _Rounded(16, 0, "float16"),
    "int8": _Int8(8, 1),
    "fp8": _Float8(8, 1),
    "4bit": _Powers(4, 1),
    "2bit": _TwoLevels(2, 2),
    "2bit-bins": _FourBins(2, 4),
    "sign": _OneLevel(1, 1),
}


def code_of(name: Any) -> ValueCode:
    """The code of a name; raises where there is none."""
    arguments.check_one_of("values", name, CODES)
    return CODES[name]


def _largest(x, real):
    """The largest magnitude of a value."""
    return jnp.max(jnp.abs(x), initial=0, where=real)


def _in_units(x, real):
    """Numbers as multiples of a power of two near the largest, and that power.

    So sums of numbers near the end of float32, and of their squares, do not overflow.
    """
    exponent = lax.bitcast_convert_type(_largest(x, real), jnp.uint32) >> 23
    # Of the smallest and the largest powers the inverse would be no normal number.
    exponent = jnp.clip(exponent, 2, 252)
    power = lambda exponent: lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return x * power(254 - exponent), power(exponent)


def _count(x, flags):
    return jnp.sum(jnp.broadcast_to(flags, x.shape), dtype=jnp.float32)


def _mean_where(x, flags):
    """The mean of the flagged numbers, 0 of none."""
    return jnp.sum(jnp.where(flags, x, 0)) / jnp.maximum(_count(x, flags), 1)


def coded(
    x: jax.Array, real: jax.Array, name: str, dtype: Any
) -> tuple[jax.Array, CodedValues]:
    """Values rounded to a code, in a dtype and in the code.

    Args:
        x: [n], of any floating dtype, zero where there is no value.
        real: Booleans [n]: where there is a value.
        name: Of the code.
        dtype: Of the rounded values.
    """
    code = code_of(name)
    codes, table = code.encode(rounded(x, jnp.float32), real)
    values = jnp.where(real, rounded(code.decode(codes, table), dtype), 0)
    return values, CodedValues(codes.astype(code.dtype), table[None], name, Origin(values))


@dataclasses.dataclass(frozen=True)
class CodedMessages:
    """How the entries of some arrays, laid end to end, travel with their values in a code.

    A code of fewer than 8 bits is the lowest bits of a slot: slot and code are one number
    in a set that is as many times as wide, whose index code then has the value, too. Its
    low bits cost what they are; where an index code cuts off more of them it costs less.
    Wider codes, and those of sets that int32 could not number then, travel in the place of
    values, 8 bits or a multiple each. Each rank's tables travel by themselves, an
    all-gather before the messages.

    Attributes:
        code: The code.
        units: How many units the arrays have.
        arrays: How many arrays there are, each with its table.
    """

    code: ValueCode
    units: int
    arrays: int

    @classmethod
    def of(
        cls, name: str | None, units: int, arrays: int, dtype: jnp.dtype
    ) -> "CodedMessages | None":
        """How they travel; None where values travel as they are: in no more bits.

        Args:
            name: The code; None where there is none.
            units: How many units the arrays have.
            arrays: How many arrays there are.
            dtype: Of the values, were they to travel as they are.
        """
        if name is None or CODES[name].width > 8 * dtype.itemsize:
            return None
        return cls(CODES[name], units, arrays)

    @property
    def slot_bits(self) -> int:
        """The bits of a slot that are the code of its value."""
        numbered = -(-self.units // bits.WORD) * bits.WORD << self.code.width
        return self.code.width if self.code.width < 8 and numbered < MOST_NUMBERED else 0

    @property
    def unit_bytes(self) -> int:
        """Bytes of a value beside its slot."""
        return 0 if self.slot_bits else self.code.dtype.itemsize

    def table_bytes(self, ranks: int) -> int:
        """Bytes that a rank sends for its tables."""
        return (ranks - 1) * 4 * self.arrays * self.code.table

    def slots(self, x: Entries, width: int) -> Slots:
        """The slots of the entries, of `width` before codes are in them."""
        units, real = bits.listed(x.index, x.capacity)
        assert x.coded is not None
        at = units << self.slot_bits
        if self.slot_bits:
            at = at | x.coded.codes.astype(jnp.int32)
        ones = jnp.where(real, jnp.uint32(1) << (at & bits.WORD - 1).astype(jnp.uint32), 0)
        words = jnp.zeros((width << self.slot_bits) // bits.WORD, jnp.uint32)
        # No bit twice, so the sum of bits is their union.
        return Slots.of(words.at[at // bits.WORD].add(ones, mode="drop")[None])

    def source(self, x: Entries) -> Source:
        """Where messages find what they have beside slots."""
        assert x.coded is not None
        codes = x.coded.codes[:, None] if self.slot_bits else x.coded.codes
        place = x.source().units
        return Source(codes[:, :0] if self.slot_bits else codes, None, place)

    def reader(
        self, x: Entries, wire: Wire, dtype: Any
    ) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Sends the tables; from a sender, slots and codes to units and their values.

        Args:
            x: The entries.
            wire: The ranks.
            dtype: Of the values that the senders have.
        """
        assert x.coded is not None
        tables, _ = wire.all_gather(x.coded.table)
        starts = jnp.cumsum(jnp.array((0, *x.parts[:-1]), jnp.int32))

        def read(sender, slots, codes):
            units = slots >> self.slot_bits
            if self.slot_bits:
                codes = slots & (1 << self.slot_bits) - 1
            of = jnp.searchsorted(starts, units, side="right", method="scan_unrolled") - 1
            table = tables[sender, of].T if self.arrays > 1 else tables[sender, 0]
            return units, rounded(self.code.decode(codes.astype(jnp.uint32), table), dtype)

        return read
