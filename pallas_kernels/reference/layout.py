"""The parts of messages: where they are, and how each is written and read.

What is in a message is said in `messages`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rank_select import WORD
from pallas_kernels.reference.slots import slots_of
from pallas_kernels.reference.specs import MessageSpec, SlotSets


MOST_FLAT = 2**31 - 1  # words that int32 numbers
SINGLE = 7  # numbers of a row of places before those of the planes


class Places:
    """The places of the parts of a message, from a row of int32.

    A row goes through loops as it is, and numbers are read in them: as operands of a loop
    each of them, and each that is computed from them, is a kernel to compile.

    Attributes:
        string: Where the string begins, or the bitmap.
        length: How many words it has; 0 where all slots are in one block.
        values: Where the values begin, which is where the lanes end.
        has_lanes: 0 of a bitmap, else 1.
        has_string: Whether there is a string.
        shift: How many low bits of a slot are in lanes; at most 30.
        end: How many words the message has.
        planes: For each byte of the lanes where it begins, and whether it is sent: 1 or 0.
            One that is not begins after the values of the longest message.
    """

    def __init__(self, row: jax.Array):
        numbers = [lax.index_in_dim(row, i, keepdims=False) for i in range(row.size)]
        self.string, self.length, self.values, self.has_lanes, *numbers = numbers
        self.has_string, self.shift, self.end, *planes = numbers
        self.planes = list(zip(planes[::2], planes[1::2], strict=True))


class Run(NamedTuple):
    """A run of entries, and their places in a message: data, equal for all parts.

    Attributes:
        first: The rank of the first entry.
        length: How many entries a message has at most, and there is room for.
        places: Where the parts of a message are.
    """

    first: jax.Array
    length: jax.Array
    places: Places

    @classmethod
    def of(cls, numbers: jax.Array, spec: MessageSpec) -> "Run":
        """The run that numbers of messages say: first, length, and a row of `Places`."""
        number = lambda i: lax.index_in_dim(numbers, spec.at + i, keepdims=False)
        begin = spec.at + 2
        row = lax.slice_in_dim(numbers, begin, begin + SINGLE + 2 * spec.planes)
        return cls(number(0), number(1), Places(row))

    def here(self, counts: jax.Array) -> jax.Array:
        """How many entries messages have, of parts that have `counts` in all."""
        return jnp.clip(counts - self.first, 0, self.length)


class Prefix(NamedTuple):
    """What is in messages before values, and what says which values follow.

    Attributes:
        message: uint32 [parts, words], the headers, strings and lanes.
        listed: int32 [parts, room], the slots, which the map of the spec takes to units;
            or the units. Any after the last.
        counts: int32 [parts], how many slots each part has.
        numbers: As for `pack_message`.
    """

    message: jax.Array
    listed: jax.Array
    counts: jax.Array
    numbers: jax.Array

    @classmethod
    def of(cls, sets: SlotSets, numbers, spec: MessageSpec, words: int) -> "Prefix":
        """Writes headers and slots of sets, in the first words of messages.

        Args:
            sets: The slots of each part.
            numbers: As for `pack_message`.
            spec: What is static.
            words: How many words: at least as many as come before values.
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
        # Headers and lanes in one kernel, marks in theirs.
        column = lax.broadcasted_iota(jnp.int32, (parts, words), 1)
        headers = lax.bitcast_convert_type(counts, jnp.uint32)[:, None]
        lanes = _lanes(jnp.where(is_there, slots, 0), places, column)
        message = jnp.where(column == 0, headers, lanes)
        marked = here * places.has_string
        message = mark(message, part, places, slots, jnp.int32(0), marked)
        return cls(message, slots if units is None else units, counts, numbers)

    def values(self, array: jax.Array, spec: MessageSpec, room: int) -> jax.Array:
        """The words of the first `room` values, zeros where there are fewer.

        All is computed by the kernel that reads them: nothing of it is handed to a branch.
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
    """The words of lanes where messages have them, zeros where they have a string."""
    if not places.planes:
        return jnp.zeros(column.shape, jnp.uint32)
    # Lanes follow one another, and one that is not sent begins after all values.
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
        message: The messages.
        part: Which of them: one, or int32 [parts, 1] for all.
        places: The places of its parts.
        slots: int32 [k], or [parts, k], the slots of the entries.
        at: The first of them, counted in the message.
        here: How many entries the message has, shaped as `part`.
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
    # Laid end to end: an index of two numbers is a kernel more to compile.
    word = part * room + word
    word = jnp.where(rank < here, word, message.size)
    flat = message.reshape(-1)
    flat = flat.at[word].add(one, mode="drop", wrap_negative_indices=False)
    return flat.reshape(message.shape)


def to_words(values: jax.Array) -> jax.Array:
    """[parts, entries, ...] to uint32 [parts, words]; numbers of a part fill its words."""
    parts, size = values.shape[0], values.dtype.itemsize
    words = math.prod(values.shape[1:]) * size // 4
    if size < 4:
        values = values.reshape(parts, words, 4 // size)
    return lax.bitcast_convert_type(values, jnp.uint32).reshape(parts, words)


def taken(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Of each row the numbers in these columns, any number where there is no such column.

    Args:
        rows: [rows, ...].
        columns: int32 [k], of all rows, or [rows, k] or [1, k].
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
    """The slots of entries whose bits were found, and whose low bits are these.

    Args:
        places: The places of the message's parts.
        found: int32 [..., k], where in the string or the bitmap their bits are.
        low: int32 [..., k], what the lanes say; zero of a bitmap.
        rank: int32 [k], which entries they are.
    """
    # The slots of a bitmap; of another code their blocks, if there are several.
    block = (found - places.has_lanes * rank) * places.has_string
    return low | (block << places.shift)


def from_words(words: jax.Array, dtype: Any) -> jax.Array:
    """Inverse of `to_words`: [parts, numbers]."""
    parts, size = words.shape[0], jnp.dtype(dtype).itemsize
    numbers = 4 * words.shape[1] // size
    if size > 4:
        words = words.reshape(parts, numbers, size // 4)
    return lax.bitcast_convert_type(words, dtype).reshape(parts, numbers)
