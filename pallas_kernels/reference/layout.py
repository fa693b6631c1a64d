"""The parts of messages: their offsets, and how each is written and read.

`messages` describes the format.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rank_select import WORD
from pallas_kernels.reference.slots import slots_of
from pallas_kernels.reference.specs import MessageSpec, SlotSets


MOST_FLAT = 2**31 - 1  # the most words that int32 can number
SINGLE = 7  # numbers in a row of `Places` before those of the planes


class Places:
    """The offsets of the parts of a message, from a row of int32.

    A loop has the row as one operand, and its body reads the numbers from it: as operands
    each number, and each that is computed from it, would be a kernel to compile.

    Attributes:
        string: The offset of the string, or of the bitmap.
        length: The number of words of the string; 0 if all slots are in one block.
        values: The offset of the values, which is the end of the lanes.
        has_lanes: 0 for a bitmap, else 1.
        has_string: Whether there is a string or a bitmap: 1 or 0.
        shift: The number of low bits of a slot that are in lanes; at most 30.
        end: The number of words of the message.
        planes: For each byte of the lanes its offset, and whether it is sent: 1 or 0. The
            offset of one that is not sent is after the values of the longest message.
    """

    def __init__(self, row: jax.Array):
        numbers = [lax.index_in_dim(row, i, keepdims=False) for i in range(row.size)]
        self.string, self.length, self.values, self.has_lanes, *numbers = numbers
        self.has_string, self.shift, self.end, *planes = numbers
        self.planes = list(zip(planes[::2], planes[1::2], strict=True))


class Run(NamedTuple):
    """Consecutive entries and the offsets in their message: data, equal for all parts.

    Attributes:
        first: int32 [], the rank of the first entry.
        length: int32 [], the largest number of entries of a message.
        places: The offsets of the parts of a message.
    """

    first: jax.Array
    length: jax.Array
    places: Places

    @classmethod
    def of(cls, numbers: jax.Array, spec: MessageSpec) -> "Run":
        """Reads the run from the numbers of messages: first, length, a row of `Places`."""
        number = lambda i: lax.index_in_dim(numbers, spec.at + i, keepdims=False)
        begin = spec.at + 2
        row = lax.slice_in_dim(numbers, begin, begin + SINGLE + 2 * spec.planes)
        return cls(number(0), number(1), Places(row))

    def here(self, counts: jax.Array) -> jax.Array:
        """Returns the numbers of entries of messages, of parts with `counts` in all."""
        return jnp.clip(counts - self.first, 0, self.length)


class Prefix(NamedTuple):
    """The words of messages before their values, and which values follow.

    Attributes:
        message: uint32 [parts, words], the headers, strings and lanes.
        listed: int32 [parts, room], the units, or the slots if the spec has a map from
            these to units. Unspecified after the last.
        counts: int32 [parts], the number of slots of each part.
        numbers: int32 [numbers], as for `pack_message`.
    """

    message: jax.Array
    listed: jax.Array
    counts: jax.Array
    numbers: jax.Array

    @classmethod
    def of(cls, sets: SlotSets, numbers, spec: MessageSpec, words: int) -> "Prefix":
        """Packs all of messages but the values.

        Args:
            sets: The slots of each part.
            numbers: int32 [numbers], as for `pack_message`.
            spec: The static properties of the messages.
            words: The number of words, at least as many as precede the values.
        """
        slots, counts, units, _ = sets
        parts, room = len(slots), spec.room
        run = Run.of(numbers, spec)
        if not sets.is_listed:
            slots, _ = slots_of(slots, run.first, room, counts)
        part = lax.broadcasted_iota(jnp.int32, (parts, 1), 0)
        places = run.places
        here = run.here(counts)[:, None]
        is_there = lax.iota(jnp.int32, room) < here
        # Headers and lanes are one kernel, the bits of strings another.
        column = lax.broadcasted_iota(jnp.int32, (parts, words), 1)
        headers = lax.bitcast_convert_type(counts, jnp.uint32)[:, None]
        lanes = _lanes(jnp.where(is_there, slots, 0), places, column)
        message = jnp.where(column == 0, headers, lanes)
        marked = here * places.has_string
        message = mark(message, part, places, slots, jnp.int32(0), marked)
        return cls(message, slots if units is None else units, counts, numbers)

    def values(self, array: jax.Array, spec: MessageSpec, room: int) -> jax.Array:
        """Returns the words of the first `room` values, zeros after the last value.

        The kernel that reads the values computes their units and the mask, so that neither
        is an operand of a branch.
        """
        units, parts = self.listed[:, :room], len(self.listed)
        if spec.units is not None:
            units = spec.units(lax.broadcasted_iota(jnp.int32, (parts, 1), 0), units)
        values = array.at[units].get(mode="clip", wrap_negative_indices=False)
        here = Run.of(self.numbers, spec).here(self.counts)[:, None]
        is_there = lax.iota(jnp.int32, room) < here
        is_there = is_there.reshape(parts, room, *[1] * (array.ndim - 1))
        return to_words(jnp.where(is_there, values.astype(spec.dtype), 0))


def _lanes(slots, places, column):
    """Returns the words of lanes at the columns of lanes, and zeros at all others."""
    if not places.planes:
        return jnp.zeros(column.shape, jnp.uint32)
    # Lanes are consecutive, and the offset of one that is not sent is after all values.
    before, _ = places.planes[0]
    is_lane = (column >= before) & (column < places.values)
    at, shift = column - before, jnp.zeros_like(column)
    for begin, _ in places.planes[1:]:
        at = at - jnp.where(column >= begin, begin - before, 0)
        shift = shift + jnp.where(column >= begin, 8, 0)
        before = begin

    def octet(i):
        return (taken(slots, 4 * at + i) >> shift & 0xFF).astype(jnp.uint32) << (8 * i)

    return jnp.where(is_lane, octet(0) | octet(1) | octet(2) | octet(3), 0)


def mark(
    message: jax.Array,
    part: jax.Array,
    places: Places,
    slots: jax.Array,
    at: jax.Array,
    here: jax.Array,
) -> jax.Array:
    """Sets the bits of entries in the string, or bitmap, of a part's message.

    Args:
        message: uint32 [parts, words], the messages.
        part: The number of the message, a scalar; or int32 [parts, 1] for all.
        places: The offsets of the parts of a message.
        slots: int32 [k], or [parts, k], the slots of the entries.
        at: int32 [], the number of the first of these entries in the message.
        here: int32, shaped as `part`, the number of entries of the message.
    """
    room = message.shape[1]
    rank = at + lax.iota(jnp.int32, slots.shape[-1])
    bit = (slots >> places.shift) + places.has_lanes * rank
    one = jnp.uint32(1) << (bit & (WORD - 1)).astype(jnp.uint32)
    word = places.string + (bit >> 5)
    if message.size > MOST_FLAT:
        word = jnp.where(rank < here, word, room)
        marked = message.at[jnp.broadcast_to(part, word.shape), word]
        return marked.add(one, mode="drop", wrap_negative_indices=False)
    # Flattened: a scatter by two indices would be one more kernel to compile.
    word = part * room + word
    word = jnp.where(rank < here, word, message.size)
    flat = message.reshape(-1)
    flat = flat.at[word].add(one, mode="drop", wrap_negative_indices=False)
    return flat.reshape(message.shape)


def to_words(values: jax.Array) -> jax.Array:
    """Converts values [parts, entries, ...] to uint32 [parts, words], in whole words."""
    parts, size = values.shape[0], values.dtype.itemsize
    words = math.prod(values.shape[1:]) * size // 4
    if size < 4:
        values = values.reshape(parts, words, 4 // size)
    return lax.bitcast_convert_type(values, jnp.uint32).reshape(parts, words)


def taken(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns the numbers of each row in some columns; columns out of range are clipped.

    Args:
        rows: [rows, n].
        columns: int32 [k], for all rows, or [rows, k] or [1, k].
    """
    columns = jnp.clip(columns, 0, rows.shape[1] - 1)
    columns = jnp.broadcast_to(columns, (len(rows), columns.shape[-1]))
    return jnp.take_along_axis(rows, columns, axis=1, mode="promise_in_bounds")


def put(message: jax.Array, words: jax.Array, part: Any = 0, begin: Any = 0) -> jax.Array:
    """Writes words [parts, k] into messages from `part` on."""
    return lax.dynamic_update_slice(
        message, words, (jnp.int32(part), jnp.int32(begin)), allow_negative_indices=False
    )


def slots_from(
    places: Places, found: jax.Array, low: jax.Array, rank: jax.Array
) -> jax.Array:
    """Returns the slots of entries, from the positions of their bits and their low bits.

    Args:
        places: The offsets of the message's parts.
        found: int32 [..., k], the positions of their bits in the string or bitmap.
        low: int32 [..., k], their bits in the lanes; zero for a bitmap.
        rank: int32 [k], the numbers of the entries in the message.
    """
    # For a bitmap these are the slots; for other codes the blocks, if there are several.
    block = (found - places.has_lanes * rank) * places.has_string
    return low | (block << places.shift)


def from_words(words: jax.Array, dtype: Any) -> jax.Array:
    """Converts uint32 [parts, words] to [parts, numbers]; inverts `to_words`."""
    parts, size = words.shape[0], jnp.dtype(dtype).itemsize
    numbers = 4 * words.shape[1] // size
    if size > 4:
        words = words.reshape(parts, numbers, size // 4)
    return lax.bitcast_convert_type(words, dtype).reshape(parts, numbers)
