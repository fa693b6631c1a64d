"""Sends sets of units with their values, in messages of one of a few sizes.

A message is one uint32 buffer, so that it is sent by one collective:

    header   1 word: the number of entries of the part, in all rounds
    string   the bit string of the high bits of each slot, or the bitmap
    lanes    the low 8, 16 or 32 bits of each slot, byte by byte: all lowest bytes first
    values   the units' values, in the dtype of the wire

Except on CPUs a string is padded where values have a multiple of 16 bytes, as rows do. They
then begin at such a multiple, and threads of a GPU move 16 bytes at a time.

A part with more entries than the longest message holds is sent in several rounds, each with
consecutive entries in the order of the slots. The number of rounds and the size of each
follow from the fullest part of all ranks, so all ranks agree on them. The header of a
message tells which of its entries are real and which are padding.

The offsets of lanes and values depend on the size of the message and are looked up in a
table. So only the collective is compiled once for each size.

On CPUs messages are sent in rounds, and packed and unpacked one tile at a time: see
`tiles`. On GPUs each turn of a loop whose length is data waits for the host, so all parts
are packed, and all messages unpacked, at once: see `at_once`. A stage branches once, over
the sides of a switch: nothing, one message of one of the sizes, or, where the need exceeds
the longest, rounds of the longest and one message for the rest. For arrays of numbers it
may branch before that over the ways in which messages are unpacked (`at_once.groups`).

Where Triton kernels pack and unpack, the branch of each size does so itself: a kernel is
compiled once for all sizes, and no buffer needs room for the longest message. A long
message that goes to all ranks is then sent in pieces: its header, string and lanes first,
then runs of its values. A piece is unpacked before the next is sent, so only one piece is
in memory. The bytes sent are those of the whole message.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backends import auto_prefers
from pallas_kernels.platforms import policy
from pallas_kernels.reference.layout import Prefix
from pallas_kernels.reference.messages import padded
from sparsejax.axes import as_varying, varying_axes
from sparsejax.branches import switch, together
from sparsejax.units.bits import Slots
from sparsejax.units.units import Source
from sparsejax.wire import at_once, channels, index_codes, tiles
from sparsejax.wire.at_once import Into
from sparsejax.wire.collectives import Sent, unseen_numbers
from sparsejax.wire.formats import Form, Lengths, MessageCost
from sparsejax.wire.ladder import Ladder
from sparsejax.wire.sizes import sender


class Fold(NamedTuple):
    """A fold of the entries received: a start value, and a function that adds entries.

    Attributes:
        start: The result if no entry is received.
        add: A function of the result so far, the number of the sender, slots int32 [k] and
            values [k, ...], which returns the next result. That may vary over no mesh axes
            other than those of `start` and the messages. A slot of `width` or more is a
            sentinel: no entry. The number of the sender is a scalar, or int32 [k] for
            entries of several senders.
        in_order: Whether senders are added in the order of their ranks: an ordered sum
            (`ordered`). If not, `add` may be called with the entries of all senders at
            once, and the number of the sender of each.
        into: The same operation as `add`, in a form that kernels know, if the result is one
            array: on GPUs it replaces `add`. Values are cast to the dtype of the result.
        finish: A function of the result, which returns what `transmit` returns. On GPUs it
            is part of the program that unpacks the last message, so that XLA can fuse it.
    """

    start: Any
    add: Callable[[Any, jax.Array, jax.Array, jax.Array], Any]
    in_order: bool = False
    into: Into | None = None
    finish: Callable[[Any], Any] = lambda result: result


def transmit(
    ladder: Ladder,
    channel: channels.Channel,
    slots: Slots,
    source: Source,
    need: jax.Array,
    fold: Fold,
    typical: jax.Array | None = None,
) -> tuple[Any, Sent]:
    """Sends every entry of every part, and folds the entries received.

    Args:
        ladder: The message sizes.
        channel: The channel that sends the messages.
        slots: The slots of each part that this rank sends.
        source: The values of the slots.
        need: int32 [], the entries of the fullest part of all ranks, equal on all ranks.
        fold: The fold of the entries received.
        typical: float32 [k], equal on all ranks: the counts from which the payload is
            computed; if None, the counts in the headers of the messages received.

    Returns:
        The result of the fold, and the bytes, rounds and counts of the stage.
    """
    stage = _Transmission.of(ladder, channel, slots, source, fold)
    if ladder.at_once:
        return stage.at_once(need, typical)
    senders = stage.senders

    def one_round(state):
        first, carry, sums, _ = state
        rung, length = stage.ladder.next_message(need - first, stage.channel.route.messages)
        here = first, length, rung
        # Rows are sliced with these numbers, so that one kernel slices all: see `heads`.
        rows = unseen_numbers(len(slots.counts))
        buffer = lax.switch(rung, senders, stage.pack_tiles(*here), *rows)
        message, counts = stage.received(buffer)
        carry = stage.unpack_tiles(message, counts, *here, carry)
        payload = stage.cost.payload(counts if typical is None else typical, *here)
        # wire, payload and rounds in one array, so that the loop carries and adds one.
        waits = np.float32(stage.channel.route.waits)
        more = [jnp.asarray(stage.cost.wire_bytes)[rung], payload, waits]
        return first + length, carry, sums + jnp.stack(more), counts

    counts = jnp.zeros(stage.channel.sources, jnp.int32)
    counts = as_varying(counts, stage.received_axes)
    sums = jnp.zeros(3, jnp.float32)
    if typical is None:
        sums = as_varying(sums, stage.received_axes)
    state = jnp.int32(0), stage.start, sums, counts
    state = lax.while_loop(lambda state: state[0] < need, one_round, state)
    _, carry, (wire, payload, rounds), counts = state
    return fold.finish(carry), Sent(wire, payload, rounds, counts)


@dataclasses.dataclass(frozen=True)
class _Transmission:
    """One stage of an exchange: static properties, and the entries that this rank sends.

    Attributes:
        form: The offsets of the parts of a message, for each rung.
        channel: The channel that sends the messages.
        slots: The slots of each part that this rank sends.
        source: The values of the slots.
        fold: The fold of the entries received.
        axes: The mesh axes over which messages vary.
    """

    form: Form
    channel: channels.Channel
    slots: Slots
    source: Source
    fold: Fold
    axes: frozenset[str]

    @classmethod
    def of(cls, ladder, channel, slots, source, fold):
        parts = len(slots.counts)
        if source.names is not None:
            assert all(rung.code is index_codes.COO32 for rung in ladder.rungs)
        rows = parts if ladder.at_once else max(channel.sources, parts)
        form = Form(ladder, source.shape, source.wire_dtype, rows)
        return cls(form, channel, slots, source, fold, slots.axes | source.axes)

    @property
    def ladder(self) -> Ladder:
        """The message sizes."""
        return self.form.ladder

    @property
    def cost(self) -> MessageCost:
        """The cost of messages on the channel's route."""
        return MessageCost(self.ladder, self.channel.route)

    @property
    def received_axes(self) -> frozenset[str]:
        """The mesh axes over which received messages vary."""
        return self.axes - self.channel.same

    @property
    def start(self) -> Any:
        """The start of the fold, typed as varying over `received_axes`."""
        return as_varying(self.fold.start, self.received_axes)

    @property
    def senders(self) -> list[Callable[..., jax.Array]]:
        """For each rung, the branch that sends messages of its size: see `sizes.sender`."""
        rungs, parts = self.ladder.rungs, len(self.slots.counts)
        return [sender(self.channel, rung.words, parts) for rung in rungs]

    def received(self, buffer: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the messages received, and the number of entries of each source."""
        received = self.channel.received(buffer[: self.channel.sources])
        return received, lax.bitcast_convert_type(received[:, 0], jnp.int32)

    def pack_whole(self, numbers, at=0, words=None, ends=None) -> jax.Array:
        """Packs this rank's messages, consecutive entries of each part, all at once."""
        spec = dataclasses.replace(self.form.spec, at=at, end=words)
        message = at_once.pack(spec, self.slots, self.source, numbers, ends)
        missing = self.form.rows - len(self.slots.counts)
        return as_varying(jnp.pad(message, ((0, missing), (0, 0))), self.axes)

    @property
    def by_size(self) -> bool:
        """Whether values are packed on each side of the switch, in messages of one size."""
        return policy().scatters

    def prefix(self, numbers, at=0) -> Prefix:
        """Packs the words of this rank's messages that precede values."""
        spec, words = dataclasses.replace(self.form.spec, at=at), self.form.prefix
        return at_once.prefix(spec, self.slots, self.source, numbers, words)

    def sent(self, at: int, number: int, prefix: Prefix) -> jax.Array:
        """Adds values to a prefix, sends the messages of one rung, and returns received."""
        room, begin = self.ladder.rungs[number].capacity, self.form.begins[number]
        spec = dataclasses.replace(self.form.spec, at=at)
        message = at_once.with_values(spec, prefix, self.source, begin, room)
        message = as_varying(message, self.axes)
        return as_varying(self.channel.send(message), self.axes)

    def pack_tiles(self, first, length, rung) -> jax.Array:
        """Packs this rank's messages, consecutive entries of each part, tile by tile."""
        run = tiles.TileRun(first, length, self.form.places(rung))
        return tiles.pack(self.form, self.slots, self.source, run, self.axes)

    def unpack_tiles(self, message, counts, first, length, rung, carry) -> Any:
        """Folds the entries of the messages received into `carry`, tile by tile."""
        run = tiles.TileRun(first, length, self.form.places(rung))
        return tiles.unpack(self.form, message, counts, run, self.fold, carry)

    def at_once(self, need, typical) -> tuple[Any, Sent]:
        """Sends rounds of the longest message, if needed, and then one message.

        The first message is packed before the switch over sizes, for which the host waits.
        Where there are several ways to unpack the last one (`at_once.groups`), a switch
        over these encloses that over sizes.
        """
        if at_once.in_branches(self.form, self.channel.sources, self.fold):
            return self.in_branches(need, typical)
        lengths = Lengths.of(self.form, need)
        numbers = lengths.numbers, lengths.at_first
        message = self.prefix(*numbers) if self.by_size else self.pack_whole(*numbers)
        groups = at_once.groups(self.form, self.fold, self.channel.sources)
        ways = [functools.partial(self.of_group, lengths, group) for group in groups]
        of_sides = np.repeat(np.arange(len(groups)), [len(g.sides) for g in groups])
        side = lengths.side(len(self.ladder.rungs))
        number = jnp.asarray(of_sides, jnp.int32)[side]
        result, counts = switch(number, ways, message) if ways[1:] else ways[0](message)
        return result, self.cost.at_once(lengths, counts, typical)

    def of_group(self, lengths, group, message) -> tuple[Any, jax.Array]:
        """Sends and unpacks messages by a switch over the sides of one group of sizes.

        Of all groups, the first side sends nothing. The next sides, one for each rung, send
        one message. The last side packs, sends and unpacks rounds of the longest, and sends
        one message for the rest.

        Args:
            lengths: The lengths of the messages.
            group: One of `at_once.groups`.
            message: uint32 [rows, room], this rank's first messages; or their `Prefix`,
                where values are written by size.

        Returns:
            The result of the fold, and the number of entries of each sender.
        """
        top, room, senders = self.ladder.top, group.room, self.senders
        # Without the barrier XLA recomputes a constant start, such as zeros, on every side.
        start = lax.optimization_barrier(self.start)
        cut = lambda send: lambda message, start: (send(message)[:, :room], start)
        alone = senders
        if self.by_size:
            cut = lambda send: lambda prefix, start: (padded(send(prefix), room), start)
            sent = functools.partial(self.sent, lengths.at_first)
            alone = [functools.partial(sent, i) for i in range(len(senders))]

        def nothing(message, start):
            del message
            empty = jnp.zeros((self.channel.sources, room), jnp.uint32)
            return as_varying(empty, self.axes), start

        def several(message, start):
            longest = self.form.places(np.int32(len(senders) - 1))
            if self.by_size:
                message = self.pack_whole(lengths.numbers, lengths.at_first)

            def turn(state):
                first, carry, message = state
                arrived, _ = self.received(senders[-1](message))
                run = at_once.run_of(first, np.int32(top), longest)
                carry = group.unpack(arrived, run, self.fold, carry, 0)
                first, left = first + top, lengths.need - first - top
                # Only the last message, for the rest, may be shorter.
                places = jnp.where(left > top, longest, lengths.last_places)
                run = at_once.run_of(first, jnp.minimum(left, top), places)
                return first, carry, self.pack_whole(run)

            state = jnp.int32(0), start, message
            more = lambda state: lengths.need - state[0] > top
            _, carry, message = lax.while_loop(more, turn, state)
            finals = [senders[number] for number in self.ladder.finals]
            return lax.switch(lengths.final, finals, message), carry

        sides = [nothing, *map(cut, alone), several]
        sides = [sides[number] for number in group.sides]
        side = lengths.side(len(senders)) - np.int32(group.sides.start)
        arrived, carry = lax.switch(side, sides, message, start)
        arrived, counts = self.received(arrived)
        at = lengths.at_last
        result = group.unpack(arrived, lengths.numbers, self.fold, carry, at)
        return self.fold.finish(result), counts

    def in_branches(self, need, typical) -> tuple[Any, Sent]:
        """Does as `at_once`, where one kernel packs messages of all sizes and one unpacks.

        Each side of the switch packs its own messages, and unpacks a piece before the next
        is sent. So no buffer has room for the longest message, and all sides share kernels
        that are compiled once.
        """
        form, ends = self.form, at_once.ends_of(self.slots)
        ladder, lengths = self.ladder, Lengths.of(form, need)
        makers = [functools.partial(self.taker, i, ends) for i in range(len(ladder.rungs))]
        takers, alone = [make(False) for make in makers], [make(True) for make in makers]

        def nothing(carry, numbers):
            del numbers
            counts = jnp.zeros(self.channel.sources, jnp.int32)
            return carry, as_varying(counts, self.received_axes)

        def several(carry, numbers):
            given = Lengths(numbers)

            def turn(state):
                first, carry = state
                carry, _ = takers[-1](carry, given.of_round(first))
                return first + given.longest, carry

            more = lambda state: given.need - state[0] > given.longest
            _, carry = lax.while_loop(more, turn, (jnp.int32(0), carry))
            finals = [takers[number] for number in ladder.finals]
            return lax.switch(given.final, finals, carry, numbers)

        sides = [nothing, *alone, several]
        start = lax.optimization_barrier(self.start)
        side = lengths.side(len(alone))
        with auto_prefers("triton"):
            carry, counts = lax.switch(side, sides, start, lengths.numbers)
        pieces = [form.pieces(number) for number in range(len(ladder.rungs))]
        sent = self.cost.at_once(lengths, counts, typical, pieces)
        return self.fold.finish(carry), sent

    def taker(
        self, number: int, ends: jax.Array, alone: bool
    ) -> Callable[..., tuple[Any, jax.Array]]:
        """Makes a function that packs, sends and unpacks one message of a rung.

        Args:
            number: The number of the rung.
            ends: The result of `at_once.ends_of`.
            alone: Whether it is the only message of the stage.

        Returns:
            A function of the result so far and the numbers of `Lengths`, which returns the
            next result and the number of entries of each sender.
        """
        rung, pieces = self.ladder.rungs[number], self.form.pieces(number)
        bitmaps = alone and at_once.are_bitmaps(self.form, rung, self.fold)

        def receive(words):
            received = as_varying(self.channel.send(words), varying_axes(words))
            return self.channel.received(received)

        def take(carry, numbers):
            at, head = Lengths(numbers).at_last, None
            message = self.pack_whole(numbers, at, rung.words, ends)
            spec = at_once.spec_of(self.form, self.fold, at, bitmaps)
            # A slice of an array that is already in memory is a copy, not another kernel.
            (message,) = together(message)
            for piece in pieces:
                words = receive(message[:, piece.words])
                head = head or at_once.Head.of(words, numbers, spec)
                received = piece, head, words, numbers
                carry = at_once.unpack_piece(*received, self.fold, carry)
                # Without the barrier XLA could hold all pieces in memory at the same time.
                carry, message = together(carry, message)
            assert head is not None
            return carry, head.counts

        return take
