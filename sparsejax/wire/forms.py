"""Where in a message its parts are: strings, lanes and values, at every message size.

A program has one buffer for messages of all sizes. Where the parts of a message begin is
looked up when its size is known, in a table with a row for each rung, so that packing and
unpacking are compiled once. A part that a rung does not send is written behind the longest
message, where nobody looks.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax.axes import at_number
from sparsejax.units import bits
from sparsejax.wire.ladder import Ladder


MOST_FLAT = 2**31 - 1  # words that int32 numbers


class Values:
    """The values of a message's entries, as words.

    Attributes:
        shape: Of one value.
        dtype: Of the values while they travel.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any):
        self.shape, self.dtype = shape, dtype

    def unit_words(self, entries: Any) -> Any:
        """Words of the values of so many entries, a multiple of four."""
        # Dividing first keeps the product within int32.
        return (entries >> 2) * (math.prod(self.shape) * self.dtype.itemsize)

    def to_words(self, values: jax.Array) -> jax.Array:
        """[parts, entries, *shape] to uint32 [parts, words]."""
        parts = values.shape[0]
        if self.dtype.itemsize < 4:
            values = values.reshape(parts, -1, 4 // self.dtype.itemsize)
        return lax.bitcast_convert_type(values, jnp.uint32).reshape(parts, -1)

    def from_words(self, words: jax.Array, entries: int) -> jax.Array:
        """Inverse of `to_words`."""
        parts = words.shape[0]
        if self.dtype.itemsize > 4:
            words = words.reshape(parts, -1, self.dtype.itemsize // 4)
        elif self.dtype.itemsize < 4:
            words = words.reshape(parts, -1)
        values = lax.bitcast_convert_type(words, self.dtype)
        return values.reshape(parts, entries, *self.shape)


class Form(Values):
    """Where the parts of a message are, for each rung of a ladder.

    Messages that are sent and that are received have one buffer, with room for any.

    Attributes:
        ladder: The message sizes.
        shape: Of one value.
        dtype: Of the values while they travel.
        rows: How many messages a buffer has.
        room: Words of each of them.
        longest: Words of the longest string or bitmap.
        searched: Words in which a part's bits, or a message's string, are searched.
    """

    def __init__(self, ladder: Ladder, shape: tuple[int, ...], dtype: Any, rows: int):
        super().__init__(shape, dtype)
        self.ladder, self.rows = ladder, rows
        rungs = ladder.rungs
        strings = [r.code.string_words(r.capacity, ladder.width) for r in rungs]
        lanes = [r.code.lane_words(r.capacity) for r in rungs]
        tails = [
            1 + string + lane + self.unit_words(whole_tiles(r.capacity, ladder.tile))
            for string, lane, r in zip(strings, lanes, rungs, strict=True)
        ]
        # No slice may reach over the end, or XLA would move it: not that of a plane, or of
        # values, for a whole tile or for the top rung's entries, wherever they begin, nor
        # that of a part's bits, or of the longest string, which begins at word 1.
        self.planes = max(r.code.planes for r in rungs)
        spill = self.planes * (whole_tiles(ladder.top, ladder.tile) // 4)
        self.longest = max(1, *strings)
        begins = [1 + string + lane for string, lane in zip(strings, lanes, strict=True)]
        whole = max(begins) + self.unit_words(ladder.top)
        self.searched = max(self.longest, ladder.width // bits.WORD)
        self.spare = max(*tails, whole, 1 + self.searched, 1 + max(strings) + spill)
        # Behind the longest message there is room for one plane, and for a string that has
        # no blocks to tell: both are written there by messages that do not send them.
        plane = max(ladder.tile, ladder.top) // 4
        self.room = self.spare + max(plane, ladder.top // bits.WORD + 2)
        self.table = np.array(
            [
                self._places(rung, string, lane)
                for rung, string, lane in zip(rungs, strings, lanes, strict=True)
            ],
            np.int32,
        )

    def _places(self, rung, string, lane):
        """A row of the table, in the order of `Places`."""
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
            *planes,
        ]

    def places(self, rung: jax.typing.ArrayLike) -> jax.Array:
        """The places of the parts of a message, as one array: see `Places`."""
        return at_number(jnp.asarray(self.table), rung)

    def mark(
        self,
        message: jax.Array,
        part: jax.Array,
        places: "Places",
        slots: jax.Array,
        at: jax.Array,
        here: jax.Array,
    ) -> jax.Array:
        """Sets the bits of entries in the string, or bitmap, of a part's message.

        Args:
            message: The messages.
            part: Which of them: one, or int32 [parts, 1] for all.
            places: The places of its parts.
            slots: int32 [tile], or [parts, tile], the slots of the entries.
            at: The first of them, counted in the message.
            here: How many entries the message has, shaped as `part`.
        """
        rank = at + lax.iota(jnp.int32, slots.shape[-1])
        bit = (slots >> places.shift) + places.has_lanes * rank
        mark = jnp.uint32(1) << (bit & (bits.WORD - 1)).astype(jnp.uint32)
        word = places.string + (bit >> 5)
        if message.size > MOST_FLAT:
            word = jnp.where(rank < here, word, self.room)
            marked = message.at[jnp.broadcast_to(part, word.shape), word]
            return marked.add(mark, mode="drop", wrap_negative_indices=False)
        # Laid end to end: an index of two numbers is a kernel more to compile.
        word = part * self.room + word
        word = jnp.where(rank < here, word, message.size)
        flat = message.reshape(-1)
        flat = flat.at[word].add(mark, mode="drop", wrap_negative_indices=False)
        return flat.reshape(message.shape)

    def slots(
        self, places: "Places", found: jax.Array, low: jax.Array, rank: jax.Array
    ) -> jax.Array:
        """The slots of entries whose bits were found, and whose low bits are these.

        Args:
            places: The places of the message's parts.
            found: int32 [..., k], where in the string or the bitmap their bits are.
            low: int32 [..., k], what the lanes say; zero of a bitmap.
            rank: int32 [k], which entries they are.
        """
        # The slots of a bitmap; of another code their blocks, if there are several.
        block = (found - places.has_lanes * rank) * places.has_string
        return low | (block << places.shift)


class Places:
    """The places of the parts of a message, from a row of the table of a `Form`.

    A row goes through loops as it is, and numbers are read in them: as operands of a loop
    each of them, and each that is computed from them, is a kernel to compile.
    """

    def __init__(self, row: jax.Array):
        numbers = [lax.index_in_dim(row, i, keepdims=False) for i in range(row.size)]
        self.string, self.length, self.values, self.has_lanes, *numbers = numbers
        self.has_string, self.shift, *planes = numbers
        self.planes = list(zip(planes[::2], planes[1::2], strict=True))


class Lengths(NamedTuple):
    """What follows from how much there is to send, where all goes at once.

    One array: it is made by one kernel, and whoever needs a number in a branch reads it
    there, where each that was handed to the branch would be a kernel of its own.

    Attributes:
        numbers: int32, in the order of the properties; the places of the first message,
            and of the last.
    """

    numbers: jax.Array

    @classmethod
    def of(cls, form: Form, need: jax.Array) -> "Lengths":
        """Those of messages for parts of which the fullest has so many entries."""
        ladder, top = form.ladder, np.int32(form.ladder.top)
        first = lax.div(jnp.maximum(need, 1) - 1, top) * top
        rest = need - first
        final, follows = ladder.final(rest)
        rung = jnp.where(first > 0, follows, ladder.rung(rest))
        numbers = jnp.stack([need, first, rest, rung, final])
        places = [form.places(number) for number in (ladder.rung(need), rung)]
        return cls(lax.optimization_barrier(jnp.concatenate([numbers, *places])))

    def side(self, sides: int) -> jax.Array:
        """Which of the sides: nothing, one message of a rung, or several."""
        one = jnp.where(self.need > 0, self.rung + 1, 0)
        return jnp.where(self.first > 0, sides - 1, one)

    @property
    def need(self) -> jax.Array:
        """Entries of the fullest part."""
        return self.numbers[0]

    @property
    def first(self) -> jax.Array:
        """The rank of the first entry of the last message."""
        return self.numbers[1]

    @property
    def rest(self) -> jax.Array:
        """Entries of the last message."""
        return self.numbers[2]

    @property
    def rung(self) -> jax.Array:
        """Its rung."""
        return self.numbers[3]

    @property
    def final(self) -> jax.Array:
        """Which of `Ladder.finals` its rung is, if rounds come before it."""
        return self.numbers[4]

    @property
    def first_places(self) -> jax.Array:
        """The places of the parts of the first message."""
        return self.numbers[5 : 5 + (self.numbers.size - 5) // 2]

    @property
    def last_places(self) -> jax.Array:
        """The places of the parts of the last message."""
        return self.numbers[5 + (self.numbers.size - 5) // 2 :]


def whole_tiles(entries: int, tile: int) -> int:
    """As many entries as whole tiles of them have."""
    return -(-entries // tile) * tile


def taken(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Of each row the numbers in these columns, any number where there is no such column.

    Args:
        rows: [rows, ...].
        columns: int32 [k], of all rows, or [rows, k] or [1, k].
    """
    columns = jnp.clip(columns, 0, rows.shape[1] - 1)
    columns = jnp.broadcast_to(columns, (len(rows), columns.shape[-1]))
    return jnp.take_along_axis(rows, columns, axis=1, mode="promise_in_bounds")


def put(message: jax.Array, words: jax.Array, part: Any = 0, begin: Any = 0) -> jax.Array:
    """Writes words [parts, k] into messages from `part` on."""
    return lax.dynamic_update_slice(
        message, words, (jnp.int32(part), jnp.int32(begin)), allow_negative_indices=False
    )


def cut(message: jax.Array, part: jax.Array, begin: Any, length: int) -> jax.Array:
    """Words [1, length] of a part of a message."""
    return lax.dynamic_slice(
        message, (part, jnp.int32(begin)), (1, length), allow_negative_indices=False
    )
