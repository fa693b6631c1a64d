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
from sparsejax.wire import forms, index_codes
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
    sets = bits.bit_sets(slots.words, parts * room, slots.counts)
    found = bits.slots(sets, first, room)
    units = found if source.units is None else source.units(part, found)
    names = found if source.names is None else source.names(part, found)
    here = jnp.clip(slots.counts - first, 0, length)[:, None]
    places = Places(row)
    # Headers first: nothing is written over them.
    column = lax.broadcasted_iota(jnp.int32, (form.rows, form.room), 1)
    headers = lax.bitcast_convert_type(slots.counts, jnp.uint32)
    headers = jnp.pad(headers, (0, form.rows - parts))[:, None]
    message = as_varying(jnp.where(column == 0, headers, 0), axes)
    message = form.mark(message, part, places, found, jnp.int32(0), here)
    # What runs over the end of a plane is written again by the next, and by the values.
    for plane, (begin, _) in enumerate(places.planes):
        message = forms.put(message, index_codes.to_bytes(names, plane), 0, begin)
    values = form.to_words(source.read(units).astype(form.dtype))
    return forms.put(message, values, 0, places.values)


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
    sets = bits.bit_sets(strings, senders * room, ones)
    found = bits.slots(sets, jnp.int32(0), room)
    rank = lax.iota(jnp.int32, room)
    low = jnp.zeros_like(found)
    for plane, (begin, is_sent) in enumerate(places.planes):
        low = low | index_codes.from_bytes(cut(begin, room // 4), plane) * is_sent
    slots = form.slots(places, found, low, rank)
    slots = jnp.where(rank < here[:, None], slots, width)
    values = form.from_words(cut(places.values, form.unit_words(room)), room)
    if not fold.in_order:
        sender = lax.broadcasted_iota(jnp.int32, slots.shape, 0).reshape(-1)
        values = values.reshape(-1, *form.shape)
        return fold.add(carry, sender, slots.reshape(-1), values)
    turn = lambda sender, carry: fold.add(carry, sender, slots[sender], values[sender])
    return lax.fori_loop(0, senders, turn, carry)
