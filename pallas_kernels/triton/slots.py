"""Shared parts of the message kernels: select by rank, units of slots, message offsets.

`EntryConfig` has the static properties for which these kernels are compiled.
"""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels import striping
from pallas_kernels.reference.specs import TRAVELS, MessageSpec
from pallas_kernels.triton.words import count_bits, mix


@dataclasses.dataclass(frozen=True)
class EntryConfig:
    """The static properties for which kernels over entries of messages are compiled.

    Attributes:
        at: As in `MessageSpec`, like the next three.
        room: The number of entries of the longest message.
        planes: The number of bytes of a slot for which there are offsets.
        dtype: The dtype of the values in a message.
        parts: The number of parts of the `Striping` from slots to units; 0 if there is
            none.
        turns: The number of bits of its turns.
        column: The number of units of one of its columns.
        width: The number of numbers of a value.
        size: The number of units of the array.
        bits: The number of words of a set, or of a string.
        row: The number of these words that have one count, a power of two.
        rows: The number of counts of a part.
        block: The number of entries of a program, a multiple of 4.
        columns: The number of numbers of a value that a program processes at a time.
    """

    at: int
    room: int
    planes: int
    dtype: Any
    parts: int
    turns: int
    column: int
    width: int
    size: int
    bits: int
    row: int
    rows: int
    block: int
    columns: int

    @classmethod
    def of(
        cls,
        spec: MessageSpec,
        array: jax.Array,
        bits: int,
        rows: int,
        tile: tuple[int, int],
    ) -> Self:
        """Makes the properties for messages with values from or for an array.

        Args:
            spec: The static properties of the messages.
            array: [units, ...].
            bits: The number of words of a set, or of a string.
            rows: The number of counts of these words.
            tile: The number of numbers of the values of a program's entries, which are at
                least four; and the most numbers of one value at a time.
        """
        numbers, columns = tile
        width = math.prod(array.shape[1:])
        columns = min(triton.next_power_of_2(width), columns)
        units = (0, 0, 0) if spec.units is None else spec.units.turned
        return cls(
            spec.at,
            spec.room,
            spec.planes,
            jnp.dtype(spec.dtype),
            *units,
            width=width,
            size=len(array),
            bits=bits,
            row=triton.next_power_of_2(-(-bits // max(rows, 1))),
            rows=rows,
            block=max(4, numbers // columns),
            columns=columns,
        )

    @property
    def blocks(self) -> int:
        """The number of programs for each part."""
        return -(-self.room // self.block)

    @property
    def halvings(self) -> int:
        """The number of halvings after which one row is left."""
        return self.rows.bit_length()

    @property
    def unit(self) -> int:
        """The number of bytes of a value."""
        return self.width * self.dtype.itemsize

    @property
    def kind(self) -> int:
        """The index in `TRAVELS` of the dtype of the values."""
        return TRAVELS.index(self.dtype.name)


def seeds_of(units):
    """Returns the seeds of the hashes of a `Striping`'s turns, as int32; zero for None."""
    if units is None:
        return jnp.zeros(1, jnp.int32)
    seeds = striping.turn_seeds(units.parts, units.seed)
    return jnp.asarray(seeds.view(np.int32))


@triton.jit
def find_bits(words_ptr, ends_ptr, rank, there, FORM: tl.constexpr):
    """Returns the positions of the bits of some ranks.

    Args:
        words_ptr: The words.
        ends_ptr: The number of bits up to the end of each row of words.
        rank: int32, a tensor, the ranks.
        there: Booleans, a tensor, for which ranks there is a bit.
        FORM: The `EntryConfig`.
    """
    row = tl.zeros_like(rank)
    before = tl.zeros_like(rank)
    HALVINGS: tl.constexpr = FORM.halvings
    for k in tl.static_range(HALVINGS):
        step = 1 << (HALVINGS - 1 - k)
        inside = there & (row + step <= FORM.rows)
        end = tl.load(ends_ptr + row + step - 1, mask=inside, other=0)
        below = inside & (end <= rank)
        row = tl.where(below, row + step, row)
        before = tl.where(below, end, before)
    rest = rank - before
    word = row * FORM.row
    bits = tl.load(words_ptr + word, mask=there & (word < FORM.bits), other=0)
    bits = bits.to(tl.uint32, bitcast=True)
    for _ in range(FORM.row - 1):
        count = count_bits(bits)
        beyond = there & (rest >= count) & (word + 1 < FORM.bits)
        rest = tl.where(beyond, rest - count, rest)
        word = tl.where(beyond, word + 1, word)
        more = tl.load(words_ptr + word, mask=beyond, other=0)
        bits = tl.where(beyond, more.to(tl.uint32, bitcast=True), bits)
    place = tl.zeros_like(rank)
    for k in tl.static_range(5):
        half = 16 >> k
        low = bits & ((1 << half) - 1)
        count = count_bits(low)
        above = rest >= count
        place = tl.where(above, place + half, place)
        rest = tl.where(above, rest - count, rest)
        bits = tl.where(above, bits >> half, low)
    return word * 32 + place


@triton.jit
def striped_unit(part, slot, seeds_ptr, FORM: tl.constexpr):
    """Returns the unit of each slot of a part: `striping.invert`."""
    turn = turned(slot, seeds_ptr, FORM)
    return (part + FORM.parts - turn) % FORM.parts * FORM.column + slot


@triton.jit
def turned(slot, seeds_ptr, FORM: tl.constexpr):
    """Returns the turn of each slot: `striping.turn`."""
    turn = tl.zeros_like(slot)
    TURNS: tl.constexpr = FORM.turns
    for k in tl.static_range(TURNS):
        seed = tl.load(seeds_ptr + k).to(tl.uint32, bitcast=True)
        ones = mix((slot >> 5).to(tl.uint32), seed) >> (slot & 31).to(tl.uint32)
        turn += (ones & 1).to(tl.int32) * ((1 << k) % FORM.parts)
    return turn % FORM.parts


@triton.jit
def entries_here(count, run_ptr, ROOM: tl.constexpr):
    """Returns the number of entries of a message, of a part with `count` entries in all.

    It is zero or less for a message after the part's last entry.
    """
    here = tl.minimum(count - tl.load(run_ptr), tl.load(run_ptr + 1))
    return tl.minimum(here, ROOM)


@triton.jit
def values_at(words_ptr, FORM: tl.constexpr):
    """Casts a pointer to words to one to values of the message's dtype."""
    if FORM.kind == 0:
        return words_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
    elif FORM.kind == 1:
        return words_ptr.to(tl.pointer_type(tl.float16), bitcast=True)
    else:
        return words_ptr.to(tl.pointer_type(tl.bfloat16), bitcast=True)
