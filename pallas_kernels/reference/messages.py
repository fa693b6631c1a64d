"""Packs and unpacks messages of slots with their values, all parts at once.

A message is a row of words of uint32, whose offsets are in a table (`Places`):

    header   1 word: the number of entries of the part, in all its messages
    string   the bit string of the high bits of each slot, or a bitmap of the slots
    lanes    the low 8, 16 or 32 bits of each slot, byte by byte: all lowest bytes first
    values   the entries' values, one after the other

Unused words of a message are zero, and words after it are unspecified. The offsets, the
rank of the first entry and the largest number of entries are data, so one program packs
messages of every size: it processes as many entries as the capacity for each part, and
masks those that are not real.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import rank_select, striping
from pallas_kernels.rank_select import WORD
from pallas_kernels.reference import ordered as ordered_sums
from pallas_kernels.reference.slots import slots_of
from pallas_kernels.reference.specs import MessageSpec, Received, SlotSets, Unpacking


MOST_FLAT = 2**31 - 1  # the most words that int32 can number
# The most rows of words in a search: a row is found by halving, and its words in order.
MOST_ROWS = 1 << 14
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


def pack_message(sets: SlotSets, array, numbers, *, spec: MessageSpec):
    """Packs a message for each part: uint32 [parts, end]. See the operation."""
    slots, counts, units, _ = sets
    parts, room = len(slots), spec.room
    run = Run.of(numbers, spec)
    if not sets.is_listed:
        slots, _ = slots_of(slots, run.first, room, counts)
    part = lax.broadcasted_iota(jnp.int32, (parts, 1), 0)
    places = run.places
    here = run.here(counts)[:, None]
    is_there = lax.iota(jnp.int32, room) < here
    # Headers and lanes are one kernel, the bits of strings another, and values a third.
    column = lax.broadcasted_iota(jnp.int32, (parts, spec.words), 1)
    headers = lax.bitcast_convert_type(counts, jnp.uint32)[:, None]
    lanes = _lanes(jnp.where(is_there, slots, 0), places, column)
    message = jnp.where(column == 0, headers, lanes)
    told = here * places.has_string
    message = mark(message, part, places, slots, jnp.int32(0), told)
    if units is None:
        units = slots if spec.units is None else spec.units(part, slots)
    values = array.at[units].get(mode="clip", wrap_negative_indices=False)
    is_there = is_there.reshape(parts, room, *[1] * (array.ndim - 1))
    values = to_words(jnp.where(is_there, values.astype(spec.dtype), 0))
    message = put(message, values, 0, places.values)
    return message if spec.packed == spec.words else message[:, : spec.packed]


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


def unpack_message(into, received: Received, numbers, *, spec: MessageSpec, how: Unpacking):
    """Adds the values of messages to the array, or writes them. See the operation."""
    run, shape, message = Run.of(numbers, spec), into.shape[1:], received.message
    if spec.bitmaps:
        return _of_bitmaps(into, received, run, spec, how)
    in_pieces = received.ends is not None
    if in_pieces:
        message = _joined(received, run.places, how.first, spec, shape)
    slots, values, is_there = read_message(message, run, spec, shape)
    if in_pieces:
        rank = lax.iota(jnp.int32, spec.room)
        is_there = is_there & (rank >= how.first) & (rank < how.until(spec.room))
    sender = lax.broadcasted_iota(jnp.int32, slots.shape, 0)
    size = len(into)
    units = spec.units
    where = slots if units is None else units(sender, jnp.where(is_there, slots, 0))
    where = jnp.where(is_there & (where < size), where, size)
    alone = not how.replaces and len(message) == 1
    if alone or (how.ordered and not how.replaces):
        # A sender's values are read in its turn, so not all are in memory at one time.
        read = lambda number: read_values(message, run.places, spec, shape, number)
        return ordered_sums.add_senders(into, where, read)
    where, values = where.reshape(-1), values.reshape(-1, *shape).astype(into.dtype)
    if not how.replaces:
        return into.at[where].add(values, mode="drop", wrap_negative_indices=False)
    return into.at[ordered_sums.unique_places(where, size)].set(
        values, mode="drop", unique_indices=True, wrap_negative_indices=False
    )


def _of_bitmaps(into, received, run, spec, how):
    """Unpacks messages with bitmaps in the order of the array.

    A scatter of as many entries would write single numbers, each to a memory sector of its
    own. Here the array is written in its own order: each unit reads its bit and the value
    of that bit, and the 32 units of a word, of all senders, read one line of the table.
    """
    (message, table, later), values = received, run.places.values
    is_whole = (how.first, how.until(spec.room)) == (0, spec.room)
    if later is not None or spec.dtype.itemsize > 4:
        message = _joined(received, run.places, how.first, spec, ())
    if spec.dtype.itemsize > 4:
        # Values of 64 bits may begin at an odd word, so they are cut out first.
        message, values = read_values(message, run.places, spec, ()), 0
    else:
        message = from_words(message, spec.dtype)
        values = values * (4 // spec.dtype.itemsize)

    def read(array, at):
        # Indices are in range, not negative, and int32: messages are shorter than arrays.
        inside = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
        return array.reshape(-1).at[at].get(**inside)

    parts, _, per_part = spec.units.turned
    part = striping.parts_of(parts, per_part, spec.units.seed)
    slot = lax.iota(jnp.int32, per_part)
    pair = 2 * ((slot >> 5) * parts + part)
    # The bits up to the unit's own. An expression with two uses XLA would store as an array
    # as long as the result, so the table is read twice, once through a barrier.
    up_to = lambda table: read(table, pair) << (WORD - 1 - (slot & (WORD - 1)))
    is_set = up_to(lax.optimization_barrier(table)) < 0
    rank = read(table, pair + 1) + lax.population_count(up_to(table)) - 1
    length = message.shape[1]
    # A unit without a bit reads the value of another unit, which is masked below.
    found = read(message, part * length + jnp.clip(values + rank, 0, length - 1))
    found = jnp.where(is_set, found.astype(into.dtype), 0)
    found = found.reshape(-1)[: len(into)]
    if is_whole:
        return found
    rank = rank + jnp.where(is_set, 0, 1)  # the rank of the next bit, if it has none
    is_there = (rank >= how.first) & (rank < how.until(spec.room))
    return jnp.where(is_there.reshape(-1)[: len(into)], found, into)


def _joined(received, places, first, spec, shape):
    """Joins the beginning of messages with their values from entry `first` on, if given."""
    message, _, values = received
    unit = math.prod(shape) * spec.dtype.itemsize
    more = max(1 + spec.longest, spec.room // 4 * unit)
    if values is None:
        return padded(message, message.shape[1] + more)
    message = padded(message, message.shape[1] + values.shape[1] + more)
    return put(message, values, 0, places.values + first // 4 * unit)


def padded(message, words):
    """Pads messages with zeros to at least `words` words."""
    return jnp.pad(message, ((0, 0), (0, max(words - message.shape[1], 0))))


def read_message(
    message: jax.Array, run: Run, spec: MessageSpec, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reads the entries of messages, as many as the capacity.

    Args:
        message: uint32 [senders, words].
        run: The entries of the messages, and their offsets.
        spec: The static properties of the messages.
        shape: The shape of one value.

    Returns:
        The slots, int32 [senders, room]; the values, [senders, room, *shape]; and booleans
        [senders, room], which entries are real.
    """
    places = run.places
    here = run.here(lax.bitcast_convert_type(message[:, 0], jnp.int32))
    # A part of a single block has no string, and so no bits to find.
    ones = here * (places.length > 0)
    strings = cut_strings(message, places, spec.longest)
    found, _ = slots_of(strings, jnp.int32(0), spec.room, ones)
    rank = lax.iota(jnp.int32, spec.room)
    low = jnp.zeros_like(found)
    for plane, (begin, is_sent) in enumerate(places.planes):
        octets = taken(message, begin + (rank >> 2))
        octets = octets >> (8 * (rank & 3)).astype(jnp.uint32) & 0xFF
        low = low | octets.astype(jnp.int32) * is_sent << (8 * plane)
    values = read_values(message, places, spec, shape)
    return slots_from(places, found, low, rank), values, rank < here[:, None]


def read_values(
    message: jax.Array,
    places: Places,
    spec: MessageSpec,
    shape: tuple[int, ...],
    sender: jax.Array | None = None,
) -> jax.Array:
    """Reads the values of messages, [senders, room, *shape]; of one, [room, *shape]."""
    words = spec.room * math.prod(shape) * spec.dtype.itemsize // 4
    cut = _cut(message, places.values, words, sender)
    values = from_words(cut, spec.dtype).reshape(len(cut), spec.room, *shape)
    return values if sender is None else values[0]


def cut_strings(message: jax.Array, places: Places, longest: int) -> jax.Array:
    """Cuts out strings, or bitmaps, padded with zeros: uint32 [parts, longest]."""
    # Lanes and values after a string that is shorter than the longest are masked.
    used = lax.iota(jnp.int32, longest) < places.length
    return jnp.where(used, _cut(message, 1, longest), 0)


def row_ends(words: jax.Array) -> jax.Array:
    """Returns the bits up to the end of each row of words, by which kernels search rows.

    Args:
        words: uint32 [parts, n].

    Returns:
        int32 [parts, rows]; a row has `row_words(n)` words.
    """
    return rank_select.run_ends(words, row_words(words.shape[1]))


def row_words(n: int) -> int:
    """Returns the words of a row, a power of two, for at most `MOST_ROWS` rows."""
    row = 1
    while row * MOST_ROWS < n:
        row *= 2
    return row


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


def to_words(values: jax.Array) -> jax.Array:
    """Converts values [parts, entries, ...] to uint32 [parts, words], in whole words."""
    parts, size = values.shape[0], values.dtype.itemsize
    words = math.prod(values.shape[1:]) * size // 4
    if size < 4:
        values = values.reshape(parts, words, 4 // size)
    return lax.bitcast_convert_type(values, jnp.uint32).reshape(parts, words)


def from_words(words: jax.Array, dtype: Any) -> jax.Array:
    """Converts uint32 [parts, words] to [parts, numbers]; inverts `to_words`."""
    parts, size = words.shape[0], jnp.dtype(dtype).itemsize
    numbers = 4 * words.shape[1] // size
    if size > 4:
        words = words.reshape(parts, numbers, size // 4)
    return lax.bitcast_convert_type(words, dtype).reshape(parts, numbers)


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


def _cut(message, begin, words, sender=None):
    """Returns `words` words from `begin` on, of each message or of one sender's."""
    return lax.dynamic_slice(
        message,
        (jnp.int32(0 if sender is None else sender), jnp.int32(begin)),
        (len(message) if sender is None else 1, words),
        allow_negative_indices=False,
    )
