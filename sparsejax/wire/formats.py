"""Where in a message its parts are: strings, lanes and values, at every message size.

A program has one buffer for messages of all sizes. Where the parts of a message begin is
looked up when its size is known, in a table with a row for each rung, so that packing and
unpacking are compiled once. A part that a rung does not send is written after the longest
message, where nobody looks.
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
    """A run of words of a message that one collective sends.

    Attributes:
        words: Which, of the message.
        first: The first entry whose value is in it.
        last: The one after the last; as many as the first where there is none.
    """

    words: slice
    first: int
    last: int


class Form:
    """Where the parts of a message are, for each rung of a ladder.

    Messages that are sent and that are received have one buffer, with room for any.

    Attributes:
        ladder: The message sizes.
        shape: Of one value.
        dtype: Of the values while they travel.
        rows: How many messages a buffer has.
        room: Words of each of them.
        longest: Words of the longest string or bitmap, in which all are searched.
        begins: Of each rung, the word of a message at which values begin.
        prefix: Words that come before values in any message.
    """

    def __init__(self, ladder: Ladder, shape: tuple[int, ...], dtype: Any, rows: int):
        self.ladder, self.shape, self.dtype, self.rows = ladder, shape, dtype, rows
        rungs = ladder.rungs
        strings = [r.code.string_words(r.capacity, ladder.width) for r in rungs]
        lanes = [r.code.lane_words(r.capacity) for r in rungs]
        # Values are written, and read, a tile at a time where not all are at once.
        tile = 1 if ladder.at_once else ladder.tile
        tails = [
            1 + string + lane + self.unit_words(whole_tiles(r.capacity, tile))
            for string, lane, r in zip(strings, lanes, rungs, strict=True)
        ]
        # No slice may reach over the end, or XLA would move it: not that of a plane, or of
        # values, for a whole tile or for the top rung's entries, wherever they begin, nor
        # that of the longest string, which begins at word 1.
        self.planes = max(r.code.planes for r in rungs)
        spill = self.planes * (whole_tiles(ladder.top, tile) // 4)
        self.longest = max(1, *strings)
        begins = [1 + string + lane for string, lane in zip(strings, lanes, strict=True)]
        whole = max(begins) + self.unit_words(ladder.top)
        self.begins = begins
        self.spare = max(*tails, whole, 1 + self.longest, 1 + max(strings) + spill)
        # After the longest message there is room for one plane, and for a string that has
        # no blocks to tell: both are written there by messages that do not send them.
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
        """About how many entries a message may have room for."""
        words = self.room / max(self.ladder.top, 1)
        return max(int(0.9 * MOST_FLAT / words), 1)

    def _places(self, rung, string, lane):
        """A row of the table, in the order of `Places`, which kernels read."""
        code = rung.code
        planes = []
        for plane in range(self.planes):
            sent = plane < code.planes
            # A plane that this rung does not send goes where nobody looks.
            at = 1 + string + plane * (rung.capacity // 4) if sent else self.spare
            planes += [at, int(sent)]
        # So is a string where all slots are in one block.
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
        """What is static of messages, for the operations of `pallas_kernels`."""
        return MessageSpec(
            self.ladder.top, self.room, self.longest, self.planes, self.dtype
        )

    def pieces(self, number: int) -> list[Piece]:
        """The pieces in which messages of a rung are sent: see `Ladder.pieces`."""
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
        """The places of the parts of a message, as one array: see `Places`."""
        return at_number(jnp.asarray(self.table), rung)

    def unit_words(self, entries: Any) -> Any:
        """Words of the values of these entries, a multiple of four."""
        # Dividing first keeps the product within int32.
        return (entries >> 2) * (math.prod(self.shape) * self.dtype.itemsize)

    def to_words(self, values: jax.Array) -> jax.Array:
        """[parts, entries, *shape] to uint32 [parts, words]."""
        return layout.to_words(values)

    def from_words(self, words: jax.Array, entries: int) -> jax.Array:
        """Inverse of `to_words`."""
        values = layout.from_words(words, self.dtype)
        return values.reshape(words.shape[0], entries, *self.shape)


class Lengths(NamedTuple):
    """The lengths of the messages that carry all entries, where they go at once.

    One array: it is made by one kernel, and a branch that needs a number reads it
    there, where each that was handed to the branch would be a kernel of its own.

    Attributes:
        numbers: int32: the need, the rung of the last message, and which of
            `Ladder.finals` that is; then the first message, and the last: the rank of its
            first entry, how many it has at most, and the places of its parts.
    """

    numbers: jax.Array

    @classmethod
    def of(cls, form: Form, need: jax.Array) -> "Lengths":
        """Those of messages for parts of which the fullest has `need` entries."""
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
        """Which it is, of `rungs`: 0 nothing, 1 + n a message of rung n, last several."""
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
        """Which of `Ladder.finals` its rung is, if rounds come before it."""
        return self.numbers[2]

    @property
    def at_first(self) -> int:
        """Where the numbers of the first message begin."""
        return 3

    @property
    def at_last(self) -> int:
        """Where the numbers of the last message begin."""
        return (self.numbers.size + 3) // 2

    @property
    def longest(self) -> jax.Array:
        """Entries of the first message: the most that one has, if others follow."""
        return self.numbers[self.at_first + 1]

    def of_round(self, first: jax.Array) -> jax.Array:
        """The numbers where the last message is another of the longest, from a rank on.

        They are data, not the ladder's own: so all stages have the same kernel for it.
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
        """The places of the parts of the last message."""
        return self.numbers[self.at_last + 2 :]


class MessageCost(NamedTuple):
    """What messages of a ladder cost on a route.

    Attributes:
        ladder: The message sizes.
        route: What a collective puts on the wire.
    """

    ladder: Ladder
    route: Route

    @property
    def wire_bytes(self) -> np.ndarray:
        """float32 [rungs], what one rank sends in whole messages of each size."""
        sizes = [rung.words for rung in self.ladder.rungs]
        return np.array([self.route.bytes(words) for words in sizes], np.float32)

    def payload(self, expected, first, length, rung) -> jax.Array:
        """Bytes that a run of the entries of each part needed."""
        here = jnp.clip(expected - first, 0, length.astype(expected.dtype))
        return self.route.messages * jnp.mean(self.ladder.needed_bytes(here, rung))

    def at_once(self, lengths, counts, typical, pieces=None) -> Sent:
        """What was sent: rounds of the longest, and a last message; in pieces, if any."""
        ladder, expected = self.ladder, counts if typical is None else typical
        sent, longest = self.wire_bytes, np.int32(len(ladder.rungs) - 1)
        before = lax.div(lengths.first, np.int32(ladder.top))
        # All but the last message are full of what there is of a part.
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
            # One table: a look into each would be a kernel of its own.
            last, more = jnp.asarray(np.stack([sent, counts_of]))[:, lengths.rung]
            follow = before * counts_of[-1] + more
        wire = before * sent[-1] + last
        rounds = self.route.waits * follow
        nothing = lengths.need == 0
        wire, payload, rounds = (jnp.where(nothing, 0, x) for x in (wire, payload, rounds))
        return Sent(wire, payload, rounds.astype(jnp.float32), counts)


def whole_tiles(entries: int, tile: int) -> int:
    """As many entries as whole tiles of them have."""
    return -(-entries // tile) * tile


def cut(message: jax.Array, part: jax.Array, begin: Any, length: int) -> jax.Array:
    """Words [1, length] of a part of a message."""
    return lax.dynamic_slice(
        message, (part, jnp.int32(begin)), (1, length), allow_negative_indices=False
    )
