"""Messages packed and unpacked whole, all parts at once: for GPUs, and all but CPUs.

What is in a message is said in `messages`. Here there is no loop: every part is taken to
have as many entries as the longest message holds, and those that are not there are written
behind the others, or dropped. A GPU writes a few megabytes for nothing in less time than it
takes to ask the host whether a loop goes on.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.axes import as_varying
from sparsejax.units import bits
from sparsejax.units.entries import Source
from sparsejax.units.slots import Slots
from sparsejax.wire import forms
from sparsejax.wire.forms import Form, Places


def pack(
    form: Form,
    slots: Slots,
    source: Source,
    first: jax.Array,
    length: jax.Array,
    row: jax.Array,
    axes: frozenset[str],
) -> jax.Array:
    """Writes a run of ranks of each part into a message of its own.

    Args:
        form: Where the parts of a message are.
        slots: The slots of each part.
        source: Their values.
        first: The rank of the first slot.
        length: How many slots a message has room for.
        row: The places of the message's parts.
        axes: The mesh axes over which messages vary.
    """
    parts, room = len(slots.counts), form.ladder.top
    part = lax.broadcasted_iota(jnp.int32, (parts, 1), 0)
    found, _ = bits.slots_of(slots.words, first, room, slots.counts)
    places = Places(row)
    units = found if source.units is None else source.units(part, found)
    names = found if source.names is None else source.names(part, found)
    # Headers and lanes in one kernel, marks in theirs, values in another: what runs over
    # the end of a lane is written again by the values.
    column = lax.broadcasted_iota(jnp.int32, (parts, form.room), 1)
    headers = lax.bitcast_convert_type(slots.counts, jnp.uint32)[:, None]
    message = jnp.where(column == 0, headers, _lanes(names, places, column))
    message = as_varying(message, axes)
    here = jnp.clip(slots.counts - first, 0, length)[:, None]
    message = form.mark(message, part, places, found, jnp.int32(0), here)
    values = form.to_words(source.read(units).astype(form.dtype))
    message = forms.put(message, values, 0, places.values)
    return jnp.pad(message, ((0, form.rows - parts), (0, 0)))


def _lanes(names, places, column):
    """The words of lanes where messages have them, zeros where they have a string."""
    if not places.planes:
        return jnp.zeros(column.shape, jnp.uint32)
    # Lanes follow one another, and one that is not sent begins behind all values.
    before, _ = places.planes[0]
    is_lane = (column >= before) & (column < places.values)
    at, shift = column - before, jnp.zeros_like(column)
    for begin, _ in places.planes[1:]:
        at = at - jnp.where(column >= begin, begin - before, 0)
        shift = shift + jnp.where(column >= begin, 8, 0)
        before = begin

    def octet(i):
        return (forms.taken(names, 4 * at + i) >> shift & 0xFF).astype(jnp.uint32) << (
            8 * i
        )

    return jnp.where(is_lane, octet(0) | octet(1) | octet(2) | octet(3), 0)


def unpack(
    form: Form,
    message: jax.Array,
    counts: jax.Array,
    first: jax.Array,
    length: jax.Array,
    row: jax.Array,
    fold: Any,
    carry: Any,
) -> Any:
    """Folds the entries of the messages received.

    Args:
        form: Where the parts of a message are.
        message: uint32 [senders, words].
        counts: int32 [senders], how many entries each has in all.
        first: The rank of the first slot.
        length: How many slots a message has room for.
        row: The places of the message's parts.
        fold: What is made of the entries.
        carry: The result so far.
    """
    senders, room, width = len(message), form.ladder.top, form.ladder.width
    places = Places(row)
    cut = lambda begin, words: lax.dynamic_slice(
        message,
        (jnp.int32(0), jnp.int32(begin)),
        (senders, words),
        allow_negative_indices=False,
    )
    # Lanes and values that lie where a longer string would are no bits to be counted.
    used = lax.iota(jnp.int32, form.longest) < places.length
    here = jnp.clip(counts - first, 0, length)
    strings = jnp.where(used, cut(1, form.longest), 0)
    # A string that tells nothing has no bits.
    ones = here * (places.length > 0)
    found, _ = bits.slots_of(strings, jnp.int32(0), room, ones)
    rank = lax.iota(jnp.int32, room)
    low = jnp.zeros_like(found)
    for plane, (begin, is_sent) in enumerate(places.planes):
        octets = forms.taken(message, begin + (rank >> 2))
        octets = octets >> (8 * (rank & 3)).astype(jnp.uint32) & 0xFF
        low = low | octets.astype(jnp.int32) * is_sent << (8 * plane)
    slots = form.slots(places, found, low, rank)
    slots = jnp.where(rank < here[:, None], slots, width)
    values = form.from_words(cut(places.values, form.unit_words(room)), room)
    if not fold.in_order:
        sender = lax.broadcasted_iota(jnp.int32, slots.shape, 0).reshape(-1)
        values = values.reshape(-1, *form.shape)
        return fold.add(carry, sender, slots.reshape(-1), values)
    turn = lambda sender, carry: fold.add(carry, sender, slots[sender], values[sender])
    return lax.fori_loop(0, senders, turn, carry)
