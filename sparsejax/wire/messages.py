"""Sends sets of units with their values, in messages of one of a few sizes.

What goes over the wire is one uint32 buffer a message, so one collective:

    header   1 word: how many entries the part has in all
    string   the bits that tell the high bits of each slot, or the bitmap
    lanes    the low 8, 16 or 32 bits of each slot, byte by byte: all lowest bytes first
    values   the units' values, in the dtype of the wire

A part with more entries than the longest message holds goes in several rounds, each a run
of ranks in the order of the slots. How many rounds, and which size each has, follows from
the fullest part of all ranks, so all ranks agree; inside a message the header says how many
entries are real.

Where lanes and values begin depends on the size of the message, and is looked up; what is
compiled for each size is the collective alone. On GPUs all parts are packed, and all
messages unpacked, at once and without a loop: see `whole`. On CPUs the work walks over the
entries of one part after another, a tile at a time, so its cost follows the number of
entries and not the room for them. Tiles are written last to first: the bytes with which a
whole tile runs over the end of its lanes lie in the values of earlier entries, which are
written after them.

A set that is sent and a string that arrives are both bits of one part, searched for the
bits of a run of ranks. All searches of an exchange, on its way out and back, of one part or
of many, have the same shapes, so XLA compiles their kernels once. (All parts at once took
two fifths more kernels, and ran no faster on CPUs.)
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax.axes import (
    as_varying,
    at_number,
    by_platform,
    varying_axes,
    without_types,
)
from sparsejax.units import bits
from sparsejax.units.entries import Source
from sparsejax.units.slots import Slots
from sparsejax.wire import channels, collectives, forms, index_codes, whole
from sparsejax.wire.forms import Form, Places
from sparsejax.wire.ladder import Ladder


class Fold(NamedTuple):
    """Takes in the entries that arrive, some at a time.

    Attributes:
        start: The result where nothing arrives.
        add: From a result, the number of the sender, slots int32 [k] and values [k, ...]
            to the next result, which must vary over no other mesh axes than `start` and the
            messages do. A slot is `width` or more where there is no entry. The
            number of the sender is one, or int32 [k] where they are several.
        in_order: Whether senders must follow one another, as where ranks that receive the
            same messages add them up, and have to end with the same bits. If not, `add` may
            be given entries of all senders at once, and the number of the sender of each.
    """

    start: Any
    add: Callable[[Any, jax.Array, jax.Array, jax.Array], Any]
    in_order: bool = False


class Sent(NamedTuple):
    """Bytes, rounds and counts of one stage of an exchange.

    Attributes:
        wire: Bytes that one rank sent, padding included.
        payload: Bytes that the entries needed.
        rounds: How many messages followed one another, as float32.
        counts: int32 [sources]: how many entries each source had for this rank.
    """

    wire: jax.Array
    payload: jax.Array
    rounds: jax.Array
    counts: jax.Array


def transmit(
    ladder: Ladder,
    channel: channels.Channel,
    slots: Slots,
    source: Source,
    need: jax.Array,
    fold: Fold,
    typical: jax.Array | None = None,
) -> tuple[Any, Sent]:
    """Sends every entry of every part, and folds the entries that arrive.

    Args:
        ladder: The message sizes.
        channel: Where the messages go.
        slots: The slots of each part that this rank sends.
        source: The values of the slots.
        need: The count of the fullest part of all ranks, equal on all of them.
        fold: What is made of the entries that arrive.
        typical: float32 [k], equal on all ranks: the counts to reckon the payload from;
            if None, those that the messages received name.

    Returns:
        The result of the fold, and what was sent.
    """
    rows = max(channel.sources, len(slots.counts))
    form = Form(ladder, source.shape, source.wire_dtype, rows)
    axes = slots.axes | source.axes
    received_axes = axes - channel.same

    # What one rank sends at each rung, which is known when the rung is traced.
    wire_bytes = np.zeros(len(ladder.rungs), np.float32)

    def sender(number, words):
        def send(message, *rows):
            heads = collectives.heads(message, len(slots.counts), words, rows)
            received, wire_bytes[number] = channel.send(heads)
            # Over what was sent: where a rung has fewer words than the message has room
            # for, nobody looks at the others.
            received = as_varying(received, varying_axes(message))
            return lax.dynamic_update_slice(message, received, (0, 0))

        return send

    senders = [sender(number, rung.words) for number, rung in enumerate(ladder.rungs)]

    def one_round(state):
        first, carry, sums, _ = state
        rung, length = ladder.next_message(need - first, channel.messages)
        places = form.places(rung)
        packed = form, slots, source, first, length, places, axes
        message = by_platform(
            cpu=lambda: _pack(*packed), default=lambda: whole.pack(*packed)
        )
        rows = collectives.unseen_numbers(len(slots.counts))
        received = lax.switch(rung, senders, message, *rows)
        received = channel.received(received[: channel.sources])
        counts = lax.bitcast_convert_type(received[:, 0], jnp.int32)
        given = form, received, counts, first, length, places, fold, carry
        carry = by_platform(
            cpu=lambda: _unpack(*given), default=lambda: whole.unpack(*given)
        )
        expected = counts if typical is None else typical
        here = jnp.clip(expected - first, 0, length.astype(expected.dtype))
        payload = channel.messages * jnp.mean(ladder.needed_bytes(here, rung))
        # One array: three sums, of which the first two follow the rung.
        more = [jnp.asarray(wire_bytes)[rung], payload, np.float32(channel.waits)]
        return first + length, carry, sums + jnp.stack(more), counts

    counts = as_varying(jnp.zeros(channel.sources, jnp.int32), received_axes)
    sums = jnp.zeros(3, jnp.float32)
    start = (
        jnp.int32(0),
        as_varying(fold.start, received_axes),
        sums if typical is not None else as_varying(sums, received_axes),
        counts,
    )
    state = lax.while_loop(lambda state: state[0] < need, one_round, start)
    _, carry, (wire, payload, rounds), counts = state
    return carry, Sent(wire, payload, rounds, counts)


def _pack(form, slots, source, first, length, row, axes):
    """Writes a run of ranks of each part into a message of its own."""
    tile = form.ladder.tile
    plain = lambda *given: without_types(given, axes)
    words, counts, first, length, row = plain(*slots, first, length, row)
    (array,) = plain(source.array)
    source = source._replace(array=array)

    def one_part(state):
        part, message = state
        index = bits.rank_index(at_number(words, part), lanes=tile)
        count = at_number(counts, part)
        here = jnp.clip(count - first, 0, length)

        def one_tile(state):
            number, message = state
            at = number * tile
            # Added up here: what is searched for is one number, as where it is read.
            begin = first + at
            found = _alone(number, (tile,), jnp.int32, lambda: _search(index, begin, tile))
            units = found
            if source.units is not None:
                place = lambda: plain(source.units(part, found))[0]
                units = _alone(number, (tile,), jnp.int32, place)
            shape = (tile, *source.shape)
            values = _alone(number, shape, array.dtype, lambda: source.read(units))
            places = Places(row)
            message = form.mark(message, part, places, found, at, here)
            put = functools.partial(forms.put, part=part)
            for plane, (begin, is_sent) in enumerate(places.planes):
                words = index_codes.to_bytes(found[None], plane)
                message = put(message, words, begin=begin + is_sent * (at >> 2))
            words = form.to_words(values.astype(form.dtype)[None])
            message = put(message, words, begin=places.values + form.unit_words(at))
            return number - 1, message

        header = lax.bitcast_convert_type(count, jnp.uint32)[None, None]
        message = forms.put(message, header, part, 0)
        return part + 1, _from_last(here, tile, one_tile, message)

    start = jnp.zeros((form.rows, form.room), jnp.uint32)
    return as_varying(_each(len(counts), one_part, start), axes)


def _each(count, one, start):
    """Applies `one` to (number, result) for each number below a count, as one program.

    How many there are is kept from XLA, which makes a loop of a single turn a part of what
    is around it, and then has other kernels to compile for one part than for several.
    """
    (count,) = lax.optimization_barrier((jnp.int32(count),))
    _, result = lax.while_loop(lambda state: state[0] < count, one, (jnp.int32(0), start))
    return result


def _from_last(entries, tile, one_tile, start):
    """Applies `one_tile` to (number, result) for each tile of entries, from the last."""
    last = lax.div(entries + (tile - 1), np.int32(tile)) - 1
    return lax.while_loop(lambda state: state[0] >= 0, one_tile, (last, start))[1]


def _search(index, first, tile):
    """The positions of the bits of ranks first, first + 1, ...: int32 [tile]."""
    return bits.select(index, first[None], length=tile)[0]


def _alone(tile, shape, dtype, function):
    """Computes a function in kernels of its own.

    XLA:CPU makes one loop of a gather, of all that computes its indices and of all that is
    done with its result; not a part of it is vectorized then, and an entry takes 50 ns
    where it takes 5 in three loops. A branch that is always taken keeps them apart: that
    the number of a tile is never negative is more than XLA sees.
    """
    return lax.cond(tile >= 0, function, lambda: jnp.zeros(shape, dtype))


def _unpack(form, message, counts, first, length, row, fold, carry):
    """Folds the entries of the messages received, sender by sender."""
    ladder, tile = form.ladder, form.ladder.tile
    # What vary are the messages, or what a fold has in hand: a rank's own places.
    types = jax.tree.map(varying_axes, carry)
    axes = frozenset[str]().union(varying_axes(message), *jax.tree.leaves(types))
    plain = lambda *given: without_types(given, axes)
    message, counts, first, length, row, carry = plain(
        message, counts, first, length, row, carry
    )

    def one_sender(state):
        sender, carry = state
        cut = functools.partial(forms.cut, message, sender)
        index = bits.rank_index(cut(1, form.searched)[0], lanes=tile)
        here = jnp.clip(at_number(counts, sender) - first, 0, length)

        # From the last, as where they are packed: it is the same loop.
        def one_tile(state):
            number, carry = state
            at = number * tile
            places = Places(row)
            rank = at + lax.iota(jnp.int32, tile)
            search = lambda: _search(index, at, tile)
            found = _alone(number, (tile,), jnp.int32, search)
            low = jnp.zeros_like(found)
            for plane, (begin, is_sent) in enumerate(places.planes):
                octets = cut(begin + is_sent * (at >> 2), tile // 4)
                low = low | index_codes.from_bytes(octets, plane)[0] * is_sent
            slots = form.slots(places, found, low, rank)
            slots = jnp.where(rank < here, slots, ladder.width)
            words = cut(places.values + form.unit_words(at), form.unit_words(tile))
            values = form.from_words(words, tile)[0]
            return number - 1, *plain(fold.add(carry, sender, slots, values))

        return sender + 1, _from_last(here, tile, one_tile, carry)

    return jax.tree.map(as_varying, _each(len(message), one_sender, carry), types)
