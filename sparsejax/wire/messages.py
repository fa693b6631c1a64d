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

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.units import bits
from sparsejax.units.entries import Source
from sparsejax.wire import channels, collectives, index_codes
from sparsejax.wire.ladder import Ladder


Receive = Callable[[Any, jax.Array, jax.Array], Any]


class Sent(NamedTuple):
    """What one stage of an exchange did.

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
    sets: bits.BitSets,
    source: Source,
    need: jax.Array,
    receive: Receive,
    carry: Any,
    typical: jax.Array | None = None,
) -> tuple[Any, Sent]:
    """Sends every entry of every part, and hands what arrives to `receive`.

    Args:
        ladder: The message sizes.
        channel: Where the messages go.
        sets: The slots of each part that this rank sends.
        source: The values of the slots.
        need: The count of the fullest part of all ranks, equal on all of them.
        receive: From carry, slots int32 [sources, k] and values [sources, k, ...] to
            carry. A slot is `width` or more where there is no entry.
        carry: What `receive` builds up.
        typical: float32 [k], equal on all ranks: the counts to reckon the payload from;
            if None, those that the messages received name.

    Returns:
        The final carry, and what was sent.
    """
    form = _Form(ladder, source.shape, source.wire_dtype)
    axes = varying_axes(sets.words) | varying_axes(source.array)
    received_axes = axes - channel.same

    def sender(words):
        def send(message):
            received, sent = channel.send(message[:, :words])
            # Kept apart from the padding: XLA:CPU makes an all-to-all of slices and a
            # concatenation, and the two fused cost 45 ns a word.
            received = lax.optimization_barrier(received)
            padded = jnp.zeros((channel.sources, form.room), jnp.uint32)
            padded = as_varying(padded, varying_axes(received))
            # Zeros that XLA cannot see: it would make the update a padding, word by word,
            # several times as slow where messages are long.
            padded, zero = lax.optimization_barrier((padded, jnp.int32(0)))
            return lax.dynamic_update_slice(padded, received, (zero, zero)), sent

        return send

    senders = [sender(rung.words) for rung in ladder.rungs]

    def one_round(state):
        first, carry, sent = state
        rung, length = ladder.next_message(need - first, channel.messages)
        message = _pack(form, sets, source, first, length, rung, axes)
        received, wire_bytes = collectives.branch(rung, senders, message)
        received = channel.received(received)
        carry = _unpack(form, received, first, length, rung, receive, carry)
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
        as_varying(carry, received_axes),
        Sent(zero, payload, jnp.int32(0), counts),
    )
    _, carry, sent = lax.while_loop(lambda state: state[0] < need, one_round, start)
    return carry, sent


class _Form:
    """Where everything lies in a message, for each rung."""

    def __init__(self, ladder: Ladder, shape: tuple[int, ...], dtype: Any):
        self.ladder, self.shape, self.dtype = ladder, shape, dtype
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
        self.string = jnp.array(strings, jnp.int32)
        self.plane = jnp.array([r.capacity // 4 for r in rungs], jnp.int32)
        self.lanes = jnp.array(lanes, jnp.int32)
        self.lane = jnp.array([r.code.lane for r in rungs], jnp.int32)

    def unit_words(self, entries):
        # Entries come in fours; dividing first keeps the product within int32.
        return (entries // 4) * (math.prod(self.shape) * self.dtype.itemsize)

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


def _pack(form, sets, source, first, length, rung, axes):
    """Writes a run of ranks of each part into a message."""
    ladder, parts, tile = form.ladder, len(sets.counts), form.ladder.tile
    lane = form.lane[rung]
    lanes_at = 1 + form.string[rung]
    values_from = lanes_at + form.lanes[rung]
    string = sets.words
    lanes = [size.code.lane for size in ladder.rungs if size.code.lane]
    if lanes:
        # Where the rung is a bitmap this is work for nothing, but little.
        string = index_codes.unary(sets, first, length, lane, min(lanes), form.longest)
        if len(lanes) < len(ladder.rungs):
            string = jnp.where(lane == 0, sets.words, string)
    message = as_varying(jnp.zeros((parts, form.room), jnp.uint32), axes)
    message = lax.dynamic_update_slice(message, string, (0, 1))

    def one_tile(state):
        number, message = state
        at = number * tile
        found = _alone(number, axes, lambda: bits.slots(sets, first + at, tile))
        for plane in range(form.planes):
            words = index_codes.to_bytes(found, plane)
            start = lanes_at + plane * form.plane[rung] + at // 4
            # A plane that this rung does not send goes where nobody looks.
            start = jnp.where(8 * plane < lane, start, form.spare)
            message = lax.dynamic_update_slice_in_dim(message, words, start, axis=1)
        units = found
        if source.units is not None:
            units = _alone(number, axes, lambda: source.units(found))
        values = _alone(number, axes, lambda: source.array.at[units].get(mode="clip"))
        words = form.to_words(values.astype(form.dtype))
        start = values_from + form.unit_words(at)
        message = lax.dynamic_update_slice_in_dim(message, words, start, axis=1)
        return number - 1, message

    tiles = -(-length // tile)
    _, message = lax.while_loop(lambda state: state[0] >= 0, one_tile, (tiles - 1, message))
    header = lax.bitcast_convert_type(sets.counts, jnp.uint32)[:, None]
    return lax.dynamic_update_slice(message, header, (0, 0))


def _alone(tile, axes, function):
    """What a function returns, computed in kernels of its own on CPUs.

    XLA:CPU makes one loop of a gather, of all that computes its indices and of all that is
    done with its result; not a part of it is vectorized then, and an entry takes 50 ns
    where it takes 5 in three loops. A branch that is always taken keeps them apart: that
    the number of a tile is never negative is more than XLA sees.
    """
    result = jax.eval_shape(function)

    def apart():
        zeros = lambda: as_varying(jnp.zeros(result.shape, result.dtype), axes)
        return lax.cond(tile >= 0, lambda: as_varying(function(), axes), zeros)

    return lax.platform_dependent(cpu=apart, default=lambda: as_varying(function(), axes))


def _unpack(form, message, first, length, rung, receive, carry):
    """Hands the entries of the messages received to `receive`, tile by tile."""
    ladder, tile = form.ladder, form.ladder.tile
    lane = form.lane[rung]
    lanes_at = 1 + form.string[rung]
    values_from = lanes_at + form.lanes[rung]
    used = lax.iota(jnp.int32, form.longest) < form.string[rung]
    strings = jnp.where(used, message[:, 1 : 1 + form.longest], 0)
    sets = bits.bit_sets(strings, len(message) * tile)
    counts = lax.bitcast_convert_type(message[:, 0], jnp.int32)
    here = jnp.clip(counts - first, 0, length)[:, None]
    # The bitmap holds all of a part, the string of other codes just this message.
    start = jnp.where(lane == 0, first, 0)

    def one_tile(state):
        at, carry = state
        rank = at + lax.iota(jnp.int32, tile)
        found = bits.slots(sets, start + at, tile)
        low = jnp.zeros_like(found)
        for plane in range(form.planes):
            begin = lanes_at + plane * form.plane[rung] + at // 4
            octets = lax.dynamic_slice_in_dim(message, begin, tile // 4, axis=1)
            octets = index_codes.from_bytes(octets, plane)
            low = low | jnp.where(8 * plane < lane, octets, 0)
        block = jnp.where(form.string[rung] > 0, found - rank, 0)
        slots = jnp.where(lane == 0, found, low | (block << jnp.minimum(lane, 30)))
        slots = jnp.where(rank < here, slots, ladder.width)
        begin = values_from + form.unit_words(at)
        words = lax.dynamic_slice_in_dim(message, begin, form.unit_words(tile), axis=1)
        return at + tile, receive(carry, slots, form.from_words(words, tile))

    _, carry = lax.while_loop(
        lambda state: state[0] < length, one_tile, (jnp.int32(0), carry)
    )
    return carry
