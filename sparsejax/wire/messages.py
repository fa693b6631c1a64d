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
compiled for each size is the collective alone.

On CPUs messages go in rounds, whose work walks over the entries a tile at a time: see
`tiles`. On GPUs, where each turn of a loop whose length is data asks the host and waits for
it, all parts are packed, and all messages unpacked, at once: see `at_once`. One message
holds what there is, and a stage asks once: nothing, a message of one of the sizes, or, of
what exceeds the longest, rounds of the longest and one message for the rest. Of numbers
it asks before in which way messages are unpacked (`at_once.groups`).

Where our kernels pack and unpack, each size's branch does it itself: a kernel is compiled
once for all sizes, and no buffer has room for the longest. A long message that goes to all
is then sent in pieces: what tells its slots, and its values in runs. A piece is unpacked
before the next is sent, so only a piece is in memory. The bytes are those of the whole.
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
    """Takes in the entries that arrive, some at a time.

    Attributes:
        start: The result where nothing arrives.
        add: From a result, the number of the sender, slots int32 [k] and values [k, ...]
            to the next result, which must vary over no other mesh axes than `start` and the
            messages do. A slot is `width` or more where there is no entry. The
            number of the sender is one, or int32 [k] where they are several.
        in_order: Whether senders must follow one another: an ordered sum (`ordered`). If
            not, `add` may be given entries of all senders at once, and the number of the
            sender of each.
        into: What `add` does, if the result is one array and kernels know such a thing: on
            GPUs it is done instead. Values are cast to the dtype of the result.
        finish: From the result to what is returned. On GPUs it is part of the program that
            unpacks the last message, so XLA can do it in the same pass.
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
    """Sends every entry of every part, and folds the entries that arrive.

    Args:
        ladder: The message sizes.
        channel: Where the messages go.
        slots: The slots of each part that this rank sends.
        source: The values of the slots.
        need: The count of the fullest part of all ranks, equal on all of them.
        fold: What is made of the entries that arrive.
        typical: float32 [k], equal on all ranks: the counts to compute the payload from;
            if None, those that the messages received name.

    Returns:
        The result of the fold, and what was sent.
    """
    stage = _Transmission.of(ladder, channel, slots, source, fold)
    if ladder.at_once:
        return stage.at_once(need, typical)
    senders = stage.senders

    def one_round(state):
        first, carry, sums, _ = state
        rung, length = stage.ladder.next_message(need - first, stage.channel.route.messages)
        here = first, length, rung
        # The rows of a message are cut out by kernels of one shape each: see `heads`.
        rows = unseen_numbers(len(slots.counts))
        buffer = lax.switch(rung, senders, stage.pack_tiles(*here), *rows)
        message, counts = stage.received(buffer)
        carry = stage.unpack_tiles(message, counts, *here, carry)
        payload = stage.cost.payload(counts if typical is None else typical, *here)
        # One array: three sums, of which the first two follow the rung.
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
    """One stage of an exchange: what is fixed when traced, and what this rank sends.

    Attributes:
        form: Where the parts of a message are.
        channel: Where the messages go.
        slots: The slots of each part that this rank sends.
        source: The values of the slots.
        fold: What is made of the entries that arrive.
        axes: Over which messages vary.
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
        """What messages cost."""
        return MessageCost(self.ladder, self.channel.route)

    @property
    def received_axes(self) -> frozenset[str]:
        """The axes over which messages that arrive vary."""
        return self.axes - self.channel.same

    @property
    def start(self) -> Any:
        """The result where nothing arrives."""
        return as_varying(self.fold.start, self.received_axes)

    @property
    def senders(self) -> list[Callable[..., jax.Array]]:
        """From messages to those received, at each rung."""
        rungs, parts = self.ladder.rungs, len(self.slots.counts)
        return [sender(self.channel, rung.words, parts) for rung in rungs]

    def received(self, buffer: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The messages that arrived, and how many entries each source has in all."""
        received = self.channel.received(buffer[: self.channel.sources])
        return received, lax.bitcast_convert_type(received[:, 0], jnp.int32)

    def pack_whole(self, numbers, at=0, words=None, ends=None) -> jax.Array:
        """This rank's messages: a run of ranks of each part, all parts at once."""
        spec = dataclasses.replace(self.form.spec, at=at, end=words)
        message = at_once.pack(spec, self.slots, self.source, numbers, ends)
        missing = self.form.rows - len(self.slots.counts)
        return as_varying(jnp.pad(message, ((0, missing), (0, 0))), self.axes)

    @property
    def by_size(self) -> bool:
        """Whether values are written, at once, where it is known how many are sent."""
        return policy().scatters

    def prefix(self, numbers, at=0) -> Prefix:
        """What this rank's messages have before values."""
        spec, words = dataclasses.replace(self.form.spec, at=at), self.form.prefix
        return at_once.prefix(spec, self.slots, self.source, numbers, words)

    def sent(self, at: int, number: int, prefix: Prefix) -> jax.Array:
        """What arrives where all send a message of a rung, and no other."""
        room, begin = self.ladder.rungs[number].capacity, self.form.begins[number]
        spec = dataclasses.replace(self.form.spec, at=at)
        message = at_once.with_values(spec, prefix, self.source, begin, room)
        message = as_varying(message, self.axes)
        return as_varying(self.channel.send(message), self.axes)

    def pack_tiles(self, first, length, rung) -> jax.Array:
        """This rank's messages: a run of ranks of each part, tile by tile."""
        run = tiles.TileRun(first, length, self.form.places(rung))
        return tiles.pack(self.form, self.slots, self.source, run, self.axes)

    def unpack_tiles(self, message, counts, first, length, rung, carry) -> Any:
        """What the fold makes of messages that arrived, and their counts."""
        run = tiles.TileRun(first, length, self.form.places(rung))
        return tiles.unpack(self.form, message, counts, run, self.fold, carry)

    def at_once(self, need, typical) -> tuple[Any, Sent]:
        """One message, whole, and rounds of the longest before it where there is more.

        The first message is packed before the host is asked which sizes are sent. Which
        program unpacks the last one is asked before which size it has, where there are
        several (`at_once.groups`).
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
        """The result, and each sender's count, by a switch over the sides of a group.

        The first side of all sends nothing. The next, one for each rung, send one message.
        The last sends rounds of the longest, which it packs and unpacks, and one for the
        rest.

        Args:
            lengths: What is sent.
            group: Of `at_once.groups`.
            message: This rank's, or what it has before values.
        """
        top, room, senders = self.ladder.top, group.room, self.senders
        # XLA would make zeros, of which it knows, once more on every side.
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
                # Only what is then the rest goes in a shorter one.
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
        """The same, where one kernel packs messages of all sizes, and one unpacks them.

        A side packs what it sends, and unpacks a piece before the next is sent: nothing has
        room for the longest message, and sides are kernels that are compiled once.
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
            told = Lengths(numbers)

            def turn(state):
                first, carry = state
                carry, _ = takers[-1](carry, told.of_round(first))
                return first + told.longest, carry

            more = lambda state: told.need - state[0] > told.longest
            _, carry = lax.while_loop(more, turn, (jnp.int32(0), carry))
            finals = [takers[number] for number in ladder.finals]
            return lax.switch(told.final, finals, carry, numbers)

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
        """From a result to the next, and each sender's count, by a message of a rung.

        Args:
            number: The rung.
            ends: See `at_once.ends_of`.
            alone: Whether no other message comes before.
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
            # What is cut out of an array as it is, is copied, by no kernel of its own.
            (message,) = together(message)
            for piece in pieces:
                words = receive(message[:, piece.words])
                head = head or at_once.Head.of(words, numbers, spec)
                received = piece, head, words, numbers
                carry = at_once.unpack_piece(*received, self.fold, carry)
                # Else XLA would have all pieces there at the same time.
                carry, message = together(carry, message)
            assert head is not None
            return carry, head.counts

        return take
