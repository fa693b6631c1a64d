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

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import rank_select, striping
from pallas_kernels.rank_select import WORD
from pallas_kernels.reference import ordered as ordered_sums
from pallas_kernels.reference.layout import (
    Places,
    Prefix,
    Run,
    from_words,
    put,
    slots_from,
    taken,
)
from pallas_kernels.reference.slots import slots_of
from pallas_kernels.reference.specs import MessageSpec, Received, SlotSets, Unpacking


# The most rows of words in a search: a row is found by halving, and its words in order.
MOST_ROWS = 1 << 14


def pack_message(sets: SlotSets, array, numbers, *, spec: MessageSpec):
    """Packs a message for each part: uint32 [parts, end]. See the operation."""
    prefix = Prefix.of(sets, numbers, spec, spec.words)
    values = prefix.values(array, spec, spec.room)
    message = put(prefix.message, values, 0, Run.of(numbers, spec).places.values)
    return message if spec.packed == spec.words else message[:, : spec.packed]


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
    slots, is_there = read_slots(message, run, spec)
    return slots, read_values(message, run.places, spec, shape), is_there


def read_slots(
    message: jax.Array, run: Run, spec: MessageSpec
) -> tuple[jax.Array, jax.Array]:
    """The slots of messages, int32 [senders, room], and which of them there are.

    Args:
        message: uint32 [senders, words]; it may end where the values begin.
        run: Which entries they have, and where.
        spec: What is static of them.
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
    return slots_from(places, found, low, rank), rank < here[:, None]


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


def _cut(message, begin, words, sender=None):
    """Returns `words` words from `begin` on, of each message or of one sender's."""
    return lax.dynamic_slice(
        message,
        (jnp.int32(0 if sender is None else sender), jnp.int32(begin)),
        (len(message) if sender is None else 1, words),
        allow_negative_indices=False,
    )
