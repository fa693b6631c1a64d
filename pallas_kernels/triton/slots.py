"""What kernels of messages share: bits of some ranks, units of slots, parts of messages.

`EntryConfig` is what of a message they are compiled for.
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
    """What kernels that go over entries of messages are compiled for, and no more.

    Attributes:
        at: As of a `MessageSpec`, like the next three.
        room: Entries of the longest message.
        planes: For how many bytes of a slot the places say where they are.
        dtype: Of the values while they travel.
        parts: Of the map from slots to units; 0 if there is none.
        turns: Bits by which it turns slots.
        column: Units of one of its columns.
        width: Numbers of a value.
        size: How many units there are.
        bits: Words of a set, or of a string.
        row: How many of them are counted together.
        rows: How many counts of a part there are.
        block: Entries of a program, a multiple of 4.
        columns: Numbers of a value that a program handles at a time.
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
        """Kernels for messages whose values are in an array, or go there.

        Args:
            spec: Of the messages.
            array: [units, ...].
            bits: Words of a set, or of a string.
            rows: How many counts there are of them.
            tile: Numbers of the values of a program's entries, or a few entries' of long
                rows; and of one value at a time, at most.
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
        """Programs of a part."""
        return -(-self.room // self.block)

    @property
    def halvings(self) -> int:
        """How often rows are halved until one is left."""
        return self.rows.bit_length()

    @property
    def unit(self) -> int:
        """Bytes of a value."""
        return self.width * self.dtype.itemsize

    @property
    def kind(self) -> int:
        """The number of the dtype of the values."""
        return TRAVELS.index(self.dtype.name)


def seeds_of(units):
    """Of the hashes that say how a slot is turned."""
    if units is None:
        return jnp.zeros(1, jnp.int32)
    seeds = striping.turn_seeds(units.parts, units.seed)
    return jnp.asarray(seeds.view(np.int32))


@triton.jit
def find_bits(words_ptr, ends_ptr, rank, there, FORM: tl.constexpr):
    """Where in words the bits of these ranks are.

    Args:
        words_ptr: The words.
        ends_ptr: How many bits there are up to the end of each row of them.
        rank: int32, a tensor.
        there: For which of them there is a bit.
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
    """`striping.invert`: the unit of each slot of a part."""
    turn = turned(slot, seeds_ptr, FORM)
    return (part + FORM.parts - turn) % FORM.parts * FORM.column + slot


@triton.jit
def turned(slot, seeds_ptr, FORM: tl.constexpr):
    """`striping.turn`: by how many parts the units of each slot are turned."""
    turn = tl.zeros_like(slot)
    TURNS: tl.constexpr = FORM.turns
    for k in tl.static_range(TURNS):
        seed = tl.load(seeds_ptr + k).to(tl.uint32, bitcast=True)
        ones = mix((slot >> 5).to(tl.uint32), seed) >> (slot & 31).to(tl.uint32)
        turn += (ones & 1).to(tl.int32) * ((1 << k) % FORM.parts)
    return turn % FORM.parts


@triton.jit
def entries_here(count, run_ptr, ROOM: tl.constexpr):
    """How many entries a message has, of a part that has `count` in all."""
    here = tl.minimum(count - tl.load(run_ptr), tl.load(run_ptr + 1))
    return tl.minimum(here, ROOM)


@triton.jit
def values_at(words_ptr, FORM: tl.constexpr):
    """Where values begin, as a pointer to numbers of their kind."""
    if FORM.kind == 0:
        return words_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
    elif FORM.kind == 1:
        return words_ptr.to(tl.pointer_type(tl.float16), bitcast=True)
    else:
        return words_ptr.to(tl.pointer_type(tl.bfloat16), bitcast=True)
