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

Packing and unpacking walk over the entries a tile at a time, so their cost follows the
number of entries and not the room for them. Where lanes and values begin depends on the
size of the message, and is looked up; what is compiled for each size is the collective
alone. Tiles are written last to first: the bytes with which a whole tile runs over the end
of its lanes lie in the values of earlier entries, which are written after them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.units import bits
from sparsejax.units.entries import Source
from sparsejax.units.slots import Slots
from sparsejax.wire import channels, collectives, index_codes
from sparsejax.wire.ladder import Ladder


class Fold(NamedTuple):
    """Takes in the entries that arrive, tile by tile.

    Attributes:
        start: The result where nothing arrives.
        add: From a result, slots int32 [sources, k] and values [sources, k, ...] to the
            next result. A slot is `width` or more where there is no entry.
    """

    start: Any
    add: Callable[[Any, jax.Array, jax.Array], Any]


class Sent(NamedTuple):
    """Bytes, rounds and counts of one stage of an exchange.

    Attributes:
        wire: Bytes that one rank sent, padding included.
        payload: Bytes that the entries needed.
        rounds: How many messages followed one another.
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
    form = _Form(ladder, source.shape, source.wire_dtype, rows)
    axes = slots.axes | source.axes
    received_axes = axes - channel.same

    def sender(words):
        def send(message, *rows):
            heads = collectives.heads(message, len(slots.counts), words, rows)
            received, sent = channel.send(heads)
            # Over what was sent: where a rung has fewer words than the message has room
            # for, nobody looks at the others.
            received = as_varying(received, varying_axes(message))
            return lax.dynamic_update_slice(message, received, (0, 0)), jnp.float32(sent)

        return send

    senders = [sender(rung.words) for rung in ladder.rungs]

    def one_round(state):
        first, carry, sent = state
        rung, length = ladder.next_message(need - first, channel.messages)
        places = form.places(rung)
        message = _pack(form, slots, source, first, length, places, axes)
        rows = collectives.unseen_numbers(len(slots.counts))
        received, wire_bytes = lax.switch(rung, senders, message, *rows)
        received = channel.received(received[: channel.sources])
        carry = _unpack(form, received, first, length, places, fold.add, carry)
        counts = lax.bitcast_convert_type(received[:, 0], jnp.int32)
        expected = counts if typical is None else typical
        here = jnp.clip(expected - first, 0, length.astype(expected.dtype))
        sent = Sent(
            sent.wire + wire_bytes,
            sent.payload + channel.messages * jnp.mean(ladder.needed_bytes(here, rung)),
            sent.rounds + channel.waits,
            counts,
        )
        return first + length, carry, sent

    counts = as_varying(jnp.zeros(channel.sources, jnp.int32), received_axes)
    zero = jnp.float32(0)
    payload = zero if typical is not None else as_varying(zero, received_axes)
    start = (
        jnp.int32(0),
        as_varying(fold.start, received_axes),
        Sent(zero, payload, jnp.int32(0), counts),
    )
    _, carry, sent = lax.while_loop(lambda state: state[0] < need, one_round, start)
    return carry, sent


class _Form:
    """The layout of a message, for each rung; messages sent and received share a buffer."""

    def __init__(self, ladder: Ladder, shape: tuple[int, ...], dtype: Any, rows: int):
        self.ladder, self.shape, self.dtype, self.rows = ladder, shape, dtype, rows
        rungs = ladder.rungs
        strings = [r.code.string_words(r.capacity, ladder.width) for r in rungs]
        lanes = [r.code.lane_words(r.capacity) for r in rungs]
        tails = [
            1 + string + lane + self.unit_words(-(-r.capacity // ladder.tile) * ladder.tile)
            for string, lane, r in zip(strings, lanes, rungs, strict=True)
        ]
        # A whole tile, and a whole string, may be written or read anywhere.
        self.longest = max(1, *strings)
        spill = max(r.code.planes for r in rungs) * (ladder.top // 4)
        self.spare = max(*tails, self.longest + 2, 1 + max(strings) + spill)
        self.room = self.spare + ladder.tile // 4
        self.planes = max(r.code.planes for r in rungs)
        self.table = np.array(
            [
                self._places(rung, string, lane)
                for rung, string, lane in zip(rungs, strings, lanes, strict=True)
            ],
            np.int32,
        )

    def _places(self, rung, string, lane):
        """A row of the table, in the order of `_Places`."""
        code = rung.code
        planes = []
        for plane in range(self.planes):
            sent = plane < code.planes
            # A plane that this rung does not send goes where nobody looks.
            at = 1 + string + plane * (rung.capacity // 4) if sent else self.spare
            planes += [at, int(sent)]
        return [
            code.lane,
            string,
            1 + string + lane,
            int(code.lane == 0),
            int(code.lane != 0),
            int(string > 0),
            min(code.lane, 30),
            *planes,
        ]

    def places(self, rung):
        """The places of the parts of a message, as one array: see `_Places`."""
        return jnp.asarray(self.table)[rung]

    def unit_words(self, entries):
        # Entries come in fours; dividing first keeps the product within int32.
        return (entries >> 2) * (math.prod(self.shape) * self.dtype.itemsize)

    def to_words(self, values):
        """[parts, entries, *shape] to uint32 [parts, words]."""
        parts = values.shape[0]
        if self.dtype.itemsize < 4:
            values = values.reshape(parts, -1, 4 // self.dtype.itemsize)
        return lax.bitcast_convert_type(values, jnp.uint32).reshape(parts, -1)

    def from_words(self, words, entries):
        """Inverse of `to_words`."""
        parts = words.shape[0]
        if self.dtype.itemsize > 4:
            words = words.reshape(parts, -1, self.dtype.itemsize // 4)
        elif self.dtype.itemsize < 4:
            words = words.reshape(parts, -1)
        values = lax.bitcast_convert_type(words, self.dtype)
        return values.reshape(parts, entries, *self.shape)


class _Places:
    """The places of the parts of a message, from a row of the table of a `_Form`.

    A row goes through loops as it is, and numbers are read in them: as operands of a loop
    each of them, and each that is computed from them, is a kernel to compile.
    """

    def __init__(self, row):
        numbers = [lax.index_in_dim(row, i, keepdims=False) for i in range(row.size)]
        self.lane, self.string, self.values, *numbers = numbers
        self.is_bitmap, self.has_lanes, self.has_string, self.shift, *planes = numbers
        self.planes = list(zip(planes[::2], planes[1::2], strict=True))


def _pack(form, slots, source, first, length, row, axes):
    """Writes a run of ranks of each part into a message."""
    ladder, parts, tile = form.ladder, len(slots.counts), form.ladder.tile
    string = slots.bitmap
    lanes = [size.code.lane for size in ladder.rungs if size.code.lane]
    if lanes:
        # Where the rung is a bitmap this is work for nothing, but little.
        lane = _Places(row).lane
        string = index_codes.unary(
            slots, ladder.width, first, length, lane, min(lanes), form.longest
        )
        if len(lanes) < len(ladder.rungs):
            string = jnp.where(lane == 0, slots.bitmap, string)
    message = as_varying(jnp.zeros((form.rows, form.room), jnp.uint32), axes)
    message = lax.dynamic_update_slice(message, string, (0, 1))

    def one_tile(state):
        number, message = state
        at = number * tile
        alone = functools.partial(_alone, number, axes, (parts, tile))
        begin = first + at
        found = alone(jnp.int32, lambda: slots.run(begin, tile))
        places = _Places(row)
        for plane, (begin, is_sent) in enumerate(places.planes):
            words = index_codes.to_bytes(found, plane)
            start = begin + is_sent * (at >> 2)
            message = lax.dynamic_update_slice_in_dim(message, words, start, axis=1)
        units = found
        if source.units is not None:
            units = alone(jnp.int32, lambda: source.units(found))
        values = _alone(
            number,
            axes,
            (parts, tile, *source.shape),
            source.array.dtype,
            lambda: source.read(units),
        )
        words = form.to_words(values.astype(form.dtype))
        start = places.values + form.unit_words(at)
        message = lax.dynamic_update_slice_in_dim(message, words, start, axis=1)
        return number - 1, message

    tiles = lax.div(length + (tile - 1), np.int32(tile))
    _, message = lax.while_loop(lambda state: state[0] >= 0, one_tile, (tiles - 1, message))
    header = lax.bitcast_convert_type(slots.counts, jnp.uint32)[:, None]
    return lax.dynamic_update_slice(message, header, (0, 0))


def _alone(tile, axes, shape, dtype, function):
    """Computes a function in kernels of its own on CPUs.

    XLA:CPU makes one loop of a gather, of all that computes its indices and of all that is
    done with its result; not a part of it is vectorized then, and an entry takes 50 ns
    where it takes 5 in three loops. A branch that is always taken keeps them apart: that
    the number of a tile is never negative is more than XLA sees.
    """
    # Traced once for both.
    function = jax.jit(function)

    def apart():
        zeros = lambda: as_varying(jnp.zeros(shape, dtype), axes)
        return lax.cond(tile >= 0, lambda: as_varying(function(), axes), zeros)

    return lax.platform_dependent(cpu=apart, default=lambda: as_varying(function(), axes))


def _unpack(form, message, first, length, row, add, carry):
    """Folds the entries of the messages received with `add`, tile by tile."""
    ladder, tile = form.ladder, form.ladder.tile
    used = lax.iota(jnp.int32, form.longest) < _Places(row).string
    strings = jnp.where(used, message[:, 1 : 1 + form.longest], 0)
    sets = bits.bit_sets(strings, len(message) * tile)
    counts = lax.bitcast_convert_type(message[:, 0], jnp.int32)
    here = jnp.clip(counts - first, 0, length)[:, None]
    axes = varying_axes(message)

    def one_tile(state):
        at, carry = state
        places = _Places(row)
        rank = at + lax.iota(jnp.int32, tile)
        # The bitmap holds all of a part, the string of other codes just this message. Apart
        # from what the fold computes of it, it is the same program for push and pull.
        begin = places.is_bitmap * first + at
        search = lambda: bits.slots(sets, begin, tile)
        found = _alone(at, axes, (len(message), tile), jnp.int32, search)
        low = jnp.zeros_like(found)
        for plane, (begin, is_sent) in enumerate(places.planes):
            begin = begin + is_sent * (at >> 2)
            octets = lax.dynamic_slice_in_dim(message, begin, tile // 4, axis=1)
            low = low | index_codes.from_bytes(octets, plane) * is_sent
        # The slots of a bitmap; of another code their blocks, if there are several.
        block = (found - places.has_lanes * rank) * places.has_string
        slots = low | (block << places.shift)
        slots = jnp.where(rank < here, slots, ladder.width)
        begin = places.values + form.unit_words(at)
        words = lax.dynamic_slice_in_dim(message, begin, form.unit_words(tile), axis=1)
        return at + tile, add(carry, slots, form.from_words(words, tile))

    _, carry = lax.while_loop(
        lambda state: state[0] < length, one_tile, (jnp.int32(0), carry)
    )
    return carry
