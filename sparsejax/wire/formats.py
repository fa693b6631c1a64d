"""The offsets of string, lanes and values in a message, for every message size.

A program has one buffer for messages of all sizes. The offsets in a message are looked up
at run time, in a table with a row for each rung, so packing and unpacking are compiled
once. A part that the index code of a rung does not have is written after the longest
message, into words that are never read.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.reference import layout
from pallas_kernels.reference.layout import (
    MOST_FLAT,
    Places as Places,
    mark as mark,
    put as put,
    slots_from as slots_from,
)
from pallas_kernels.reference.specs import MessageSpec
from sparsejax.branches import at_number
from sparsejax.errors import ArgumentError
from sparsejax.units import bits
from sparsejax.wire.channels import Route
from sparsejax.wire.collectives import Sent
from sparsejax.wire.ladder import Ladder


class Piece(NamedTuple):
    """Consecutive words of a message that one collective sends.

    Attributes:
        words: The slice of the words of the message.
        first: The first entry whose value is in the piece.
        last: The end of these entries, exclusive; equal to `first` if there are none.
    """

    words: slice
    first: int
    last: int


class Form:
    """The offsets of the parts of a message, for each rung of a ladder.

    Messages sent and received are in one buffer, with room for the longest.

    Attributes:
        ladder: The message sizes.
        shape: The shape of one value.
        dtype: The dtype of the values on the wire.
        rows: The number of messages of a buffer.
        room: The number of words of each message in a buffer.
        longest: The words of the longest string or bitmap; all searches have this length.
        begins: The offset of the values in a message of each rung, in words.
        prefix: The most words that precede the values of a message.
    """

    def __init__(self, ladder: Ladder, shape: tuple[int, ...], dtype: Any, rows: int):
        self.ladder, self.shape, self.dtype, self.rows = ladder, shape, dtype, rows
        rungs = ladder.rungs
        strings = [r.string for r in rungs]
        lanes = [r.code.lane_words(r.capacity) for r in rungs]
        # In rounds, values are written and read one tile at a time.
        tile = 1 if ladder.at_once else ladder.tile
        tails = [
            1 + string + lane + self.unit_words(whole_tiles(r.capacity, tile))
            for string, lane, r in zip(strings, lanes, rungs, strict=True)
        ]
        # No slice may extend past the end, or XLA would clamp its start. That goes for the
        # planes and values of a whole tile, or of all entries of the top rung, from any
        # offset, and for the longest string, which begins at word 1.
        self.planes = max(r.code.planes for r in rungs)
        spill = self.planes * (whole_tiles(ladder.top, tile) // 4)
        self.longest = max(1, *strings)
        begins = [1 + string + lane for string, lane in zip(strings, lanes, strict=True)]
        whole = max(begins) + self.unit_words(ladder.top)
        self.begins = begins
        self.spare = max(*tails, whole, 1 + self.longest, 1 + max(strings) + spill)
        # After the longest message there is room for one plane, and for a string of a part
        # of one block: messages that do not send these write them there.
        plane = max(tile, ladder.top) // 4 if self.planes else 0
        string = ladder.top // bits.WORD + 2 if 0 in strings else 0
        self.room = self.spare + max(plane, string)
        if self.room > MOST_FLAT:
            raise ArgumentError(
                f"messages with room for {ladder.top:,} entries of {ladder.unit_bytes:,} "
                f"bytes have {self.room:,} words, more than int32 can number: give a "
                f"capacity of {self._fitting():,} or less (push_capacity, pull_capacity), "
                "or shard the array over a second mesh axis."
            )
        self.table = np.array(
            [
                self._places(rung, string, lane)
                for rung, string, lane in zip(rungs, strings, lanes, strict=True)
            ],
            np.int32,
        )

    def _fitting(self):
        """Returns about the largest capacity whose messages int32 can number."""
        words = self.room / max(self.ladder.top, 1)
        return max(int(0.9 * MOST_FLAT / words), 1)

    def _places(self, rung, string, lane):
        """Returns a row of the table, in the order of `Places`, which kernels read."""
        code = rung.code
        planes = []
        for plane in range(self.planes):
            sent = plane < code.planes
            # A plane that this rung does not send is written to the spare words.
            at = 1 + string + plane * (rung.capacity // 4) if sent else self.spare
            planes += [at, int(sent)]
        # So is the string, where all slots are in one block.
        return [
            1 if string else self.spare,
            string,
            1 + string + lane,
            int(code.lane != 0),
            int(string > 0),
            min(code.lane, 30),
            rung.words,
            *planes,
        ]

    @property
    def prefix(self) -> int:
        """See the class."""
        return max(1 + self.longest, *self.begins)

    @property
    def spec(self) -> MessageSpec:
        """The static properties of messages, for the operations of `pallas_kernels`."""
        return MessageSpec(
            self.ladder.top, self.room, self.longest, self.planes, self.dtype
        )

    def pieces(self, number: int) -> list[Piece]:
        """Returns the pieces of messages of a rung: see `Ladder.pieces_of`."""
        rung, (_, _, values, *_) = self.ladder.rungs[number], self.table[number]
        count = self.ladder.pieces_of(rung)
        if count == 1:
            return [Piece(slice(0, rung.words), 0, rung.capacity)]
        each = -(-rung.capacity // (4 * count)) * 4
        pieces = [Piece(slice(0, int(values)), 0, 0)]
        for first in range(0, rung.capacity, each):
            last = min(first + each, rung.capacity)
            begin, end = (int(values) + self.unit_words(e) for e in (first, last))
            pieces.append(Piece(slice(begin, end), first, last))
        return pieces

    def places(self, rung: jax.typing.ArrayLike) -> jax.Array:
        """Returns the offsets of the parts of a message, as one array: see `Places`."""
        return at_number(jnp.asarray(self.table), rung)

    def unit_words(self, entries: Any) -> Any:
        """Returns the words of the values of a number of entries, a multiple of four."""
        # Dividing first keeps the product within int32.
        return (entries >> 2) * (math.prod(self.shape) * self.dtype.itemsize)

    def to_words(self, values: jax.Array) -> jax.Array:
        """Converts values [parts, entries, *shape] to uint32 [parts, words]."""
        return layout.to_words(values)

    def from_words(self, words: jax.Array, entries: int) -> jax.Array:
        """Converts uint32 [parts, words] to values; inverts `to_words`."""
        values = layout.from_words(words, self.dtype)
        return values.reshape(words.shape[0], entries, *self.shape)


class Lengths(NamedTuple):
    """The lengths of the messages of a stage that sends all entries at once.

    They are one array, which one kernel computes. A branch reads the numbers that it needs
    from this array, where each number as an operand would be a kernel of its own.

    Attributes:
        numbers: int32 [numbers]: the need, the rung of the last message, and its place in
            `Ladder.finals`; then for the first message, and then for the last, the rank of
            its first entry, the most entries that it has, and the offsets of its parts.
    """

    numbers: jax.Array

    @classmethod
    def of(cls, form: Form, need: jax.Array) -> "Lengths":
        """Returns the lengths of the messages where the fullest part has `need` entries."""
        ladder, top = form.ladder, np.int32(form.ladder.top)
        first = lax.div(jnp.maximum(need, 1) - 1, top) * top
        rest = need - first
        final, follows = ladder.final(rest)
        rung = jnp.where(first > 0, follows, ladder.rung(rest))
        numbers = [
            jnp.stack([need, rung, final, jnp.zeros_like(need), jnp.minimum(need, top)]),
            form.places(ladder.rung(need)),
            jnp.stack([first, rest]),
            form.places(rung),
        ]
        return cls(lax.optimization_barrier(jnp.concatenate(numbers)))

    def side(self, rungs: int) -> jax.Array:
        """Returns the side of the switch over sizes, of a ladder of `rungs` rungs.

        Side 0 sends nothing, side 1 + n one message of rung n, and side 1 + rungs several
        messages.
        """
        one = jnp.where(self.need > 0, self.rung + 1, 0)
        return jnp.where(self.first > 0, np.int32(rungs + 1), one)

    @property
    def need(self) -> jax.Array:
        """Entries of the fullest part."""
        return self.numbers[0]

    @property
    def rung(self) -> jax.Array:
        """The rung of the last message."""
        return self.numbers[1]

    @property
    def final(self) -> jax.Array:
        """The place of that rung in `Ladder.finals`, if rounds come before the message."""
        return self.numbers[2]

    @property
    def at_first(self) -> int:
        """The offset of the numbers of the first message in `numbers`."""
        return 3

    @property
    def at_last(self) -> int:
        """The offset of the numbers of the last message in `numbers`."""
        return (self.numbers.size + 3) // 2

    @property
    def longest(self) -> jax.Array:
        """The entries of the first message, which is the longest if others follow."""
        return self.numbers[self.at_first + 1]

    def of_round(self, first: jax.Array) -> jax.Array:
        """Returns the numbers with the longest message from rank `first` on as the last.

        Its length is read from `numbers` and not from the ladder, so it is no constant, and
        all stages share one kernel.
        """
        parts = self.numbers[: self.at_last], first[None], self.numbers[4 : self.at_last]
        return jnp.concatenate(parts)

    @property
    def first(self) -> jax.Array:
        """The rank of the first entry of the last message."""
        return self.numbers[self.at_last]

    @property
    def rest(self) -> jax.Array:
        """Entries of the last message."""
        return self.numbers[self.at_last + 1]

    @property
    def last_places(self) -> jax.Array:
        """The offsets of the parts of the last message: see `Places`."""
        return self.numbers[self.at_last + 2 :]


class MessageCost(NamedTuple):
    """The bytes and rounds of messages of a ladder on a route.

    Attributes:
        ladder: The message sizes.
        route: The messages that a collective sends.
    """

    ladder: Ladder
    route: Route

    @property
    def wire_bytes(self) -> np.ndarray:
        """float32 [rungs], the bytes that one rank sends in messages of each size."""
        sizes = [rung.words for rung in self.ladder.rungs]
        return np.array([self.route.bytes(words) for words in sizes], np.float32)

    def payload(self, expected, first, length, rung) -> jax.Array:
        """Returns the bytes that entries `first` to `first + length` of parts need."""
        here = jnp.clip(expected - first, 0, length.astype(expected.dtype))
        return self.route.messages * jnp.mean(self.ladder.needed_bytes(here, rung))

    def at_once(self, lengths, counts, typical, pieces=None) -> Sent:
        """Returns the bytes, rounds and counts of a stage that sends all at once.

        Args:
            lengths: The lengths of the messages.
            counts: int32 [sources], the number of entries of each source.
            typical: The counts for the payload, as for `transmit`.
            pieces: The pieces of the messages of each rung; None if messages are not split.
        """
        ladder, expected = self.ladder, counts if typical is None else typical
        sent, longest = self.wire_bytes, np.int32(len(ladder.rungs) - 1)
        before = lax.div(lengths.first, np.int32(ladder.top))
        # The messages before the last one hold the first `lengths.first` entries of a part.
        payload = ladder.needed_bytes(jnp.minimum(expected, lengths.first), longest)
        headers = (before - 1) * ladder.needed_bytes(jnp.float32(0), longest)
        payload = self.route.messages * (jnp.mean(payload) + headers)
        payload = jnp.where(before > 0, payload, 0)
        payload += self.payload(expected, lengths.first, lengths.rest, lengths.rung)
        if pieces is None:
            last, follow = jnp.asarray(sent)[lengths.rung], before + 1
        else:
            words = lambda piece: piece.words.stop - piece.words.start
            cost = lambda piece: self.route.bytes(words(piece))
            sent = np.array([sum(map(cost, each)) for each in pieces], np.float32)
            counts_of = np.array([len(each) for each in pieces], np.float32)
            # One table, since a lookup in each of two would be a kernel of its own.
            last, more = jnp.asarray(np.stack([sent, counts_of]))[:, lengths.rung]
            follow = before * counts_of[-1] + more
        wire = before * sent[-1] + last
        rounds = self.route.waits * follow
        nothing = lengths.need == 0
        wire, payload, rounds = (jnp.where(nothing, 0, x) for x in (wire, payload, rounds))
        return Sent(wire, payload, rounds.astype(jnp.float32), counts)


def whole_tiles(entries: int, tile: int) -> int:
    """Rounds a number of entries up to a multiple of `tile`."""
    return -(-entries // tile) * tile


def cut(message: jax.Array, part: jax.Array, begin: Any, length: int) -> jax.Array:
    """Returns uint32 [1, length], words of the message of one part from `begin` on."""
    return lax.dynamic_slice(
        message, (part, jnp.int32(begin)), (1, length), allow_negative_indices=False
    )
