"""Messages of sets of slots with their values, written and read whole, all parts at once.

A message is a row of words of uint32, of which a table (`Places`) says what is where:

    header   1 word: how many entries the part has in all
    string   the bits that tell the high bits of each slot, or a bitmap of the slots
    lanes    the low 8, 16 or 32 bits of each slot, byte by byte: all lowest bytes first
    values   the entries' values, one after the other

All words of a message in which there is nothing are zero, and words after it may be
anything. The places, the rank of the first entry and how many entries there are at most are
data, so one program writes messages of every size: it takes each part to have as many
entries as there is room for, and leaves out those that are not there.
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


# Of words that are searched: a row is found by halving, a word in it one by one.
MOST_ROWS = 1 << 14


def pack_message(sets: SlotSets, array, numbers, *, spec: MessageSpec):
    """A message for each part: uint32 [parts, end]. See the operation."""
    prefix = Prefix.of(sets, numbers, spec, spec.words)
    values = prefix.values(array, spec, spec.room)
    message = put(prefix.message, values, 0, Run.of(numbers, spec).places.values)
    return message if spec.packed == spec.words else message[:, : spec.packed]


def unpack_message(into, received: Received, numbers, *, spec: MessageSpec, how: Unpacking):
    """The array with what arrived added, or set. See the operation."""
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
        # A sender's values are read in its turn: all of them are never there at once.
        read = lambda number: read_values(message, run.places, spec, shape, number)
        return ordered_sums.add_senders(into, where, read)
    where, values = where.reshape(-1), values.reshape(-1, *shape).astype(into.dtype)
    if not how.replaces:
        return into.at[where].add(values, mode="drop", wrap_negative_indices=False)
    return into.at[ordered_sums.apart(where, size)].set(
        values, mode="drop", unique_indices=True, wrap_negative_indices=False
    )


def _of_bitmaps(into, received, run, spec, how):
    """The array whose units each read their own bit, and the value of that bit.

    A scatter of as many entries writes single numbers, each to a sector of memory of its
    own. Here the array is written in its own order, and the 32 units of a word of bits, of
    all senders, read one line of the table.
    """
    (message, table, later), values = received, run.places.values
    is_whole = (how.first, how.until(spec.room)) == (0, spec.room)
    if later is not None or spec.dtype.itemsize > 4:
        message = _joined(received, run.places, how.first, spec, ())
    if spec.dtype.itemsize > 4:
        # Their words may begin at an odd one.
        message, values = read_values(message, run.places, spec, ()), 0
    else:
        message = from_words(message, spec.dtype)
        values = values * (4 // spec.dtype.itemsize)

    def read(array, at):
        # In range, not negative, and within int32: messages are shorter than the array.
        inside = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
        return array.reshape(-1).at[at].get(**inside)

    parts, _, per_part = spec.units.turned
    part = striping.parts_of(parts, per_part, spec.units.seed)
    slot = lax.iota(jnp.int32, per_part)
    pair = 2 * ((slot >> 5) * parts + part)
    # The bits up to its own. What is used twice XLA would make an array of, as long as the
    # result: so it is read twice, of what XLA takes for another table.
    up_to = lambda table: read(table, pair) << (WORD - 1 - (slot & (WORD - 1)))
    is_set = up_to(lax.optimization_barrier(table)) < 0
    rank = read(table, pair + 1) + lax.population_count(up_to(table)) - 1
    length = message.shape[1]
    # Of a unit without a bit that of another.
    found = read(message, part * length + jnp.clip(values + rank, 0, length - 1))
    found = jnp.where(is_set, found.astype(into.dtype), 0)
    found = found.reshape(-1)[: len(into)]
    if is_whole:
        return found
    rank = rank + jnp.where(is_set, 0, 1)  # of the next one, if it has none
    is_there = (rank >= how.first) & (rank < how.until(spec.room))
    return jnp.where(is_there.reshape(-1)[: len(into)], found, into)


def _joined(received, places, first, spec, shape):
    """Messages of which the beginning is here, and values from some entry on, if given."""
    message, _, values = received
    unit = math.prod(shape) * spec.dtype.itemsize
    more = max(1 + spec.longest, spec.room // 4 * unit)
    if values is None:
        return padded(message, message.shape[1] + more)
    message = padded(message, message.shape[1] + values.shape[1] + more)
    return put(message, values, 0, places.values + first // 4 * unit)


def padded(message, words):
    """Messages of at least `words` words, zeros where there were fewer."""
    return jnp.pad(message, ((0, 0), (0, max(words - message.shape[1], 0))))


def read_message(
    message: jax.Array, run: Run, spec: MessageSpec, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The entries of messages, as many as there is room for.

    Args:
        message: uint32 [senders, words].
        run: Which entries they have, and where.
        spec: What is static of them.
        shape: Of one value.

    Returns:
        The slots int32 [senders, room], the values [senders, room, *shape], and which of
        them there are.
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
    # A string that tells nothing has no bits.
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
    """The values of messages, [senders, room, *shape]; of one, [room, *shape]."""
    words = spec.room * math.prod(shape) * spec.dtype.itemsize // 4
    cut = _cut(message, places.values, words, sender)
    values = from_words(cut, spec.dtype).reshape(len(cut), spec.room, *shape)
    return values if sender is None else values[0]


def cut_strings(message: jax.Array, places: Places, longest: int) -> jax.Array:
    """The strings, or bitmaps, of messages, zeros after them: uint32 [parts, longest]."""
    # Lanes and values that lie where a longer string would are no bits to be counted.
    used = lax.iota(jnp.int32, longest) < places.length
    return jnp.where(used, _cut(message, 1, longest), 0)


def row_ends(words: jax.Array) -> jax.Array:
    """The bits up to the end of each row of words, for kernels that search rows by halving.

    Args:
        words: uint32 [parts, n].

    Returns:
        int32 [parts, rows]; a row has `row_words(n)` words.
    """
    return rank_select.run_ends(words, row_words(words.shape[1]))


def row_words(n: int) -> int:
    """How many of n words a row has, so that there are few: a power of two."""
    row = 1
    while row * MOST_ROWS < n:
        row *= 2
    return row


def _cut(message, begin, words, sender=None):
    """So many words of each message, or of that of a sender."""
    return lax.dynamic_slice(
        message,
        (jnp.int32(0 if sender is None else sender), jnp.int32(begin)),
        (len(message) if sender is None else 1, words),
        allow_negative_indices=False,
    )
