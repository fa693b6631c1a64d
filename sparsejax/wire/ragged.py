"""Sends sets of units with their values in messages as long as what is there.

What goes over the wire is one uint32 string of words a message, and one ragged all-to-all
for all of a rank's messages:

    string   the bits that tell the high bits of each slot, or the bitmap
    lanes    the low 8, 16 or 32 bits of each slot, byte by byte: all lowest bytes first
    values   the units' values, in the dtype of the wire

A part with c entries has as many words as c entries need in the code that is shortest for c
entries; without any it has none. So nothing is padded but for the ends of string, lanes and
values, each to a whole word. There is no header: how many entries each rank has for which
was exchanged before, since a ragged all-to-all has to be told the lengths on both sides,
and where the parts of a message begin follows from its count. All codes are read by one
program, in which the code is a number looked up for each message.

Buffers have a fixed size all the same: room for so many entries of each part, where the
message of rank i, of whatever length, begins at row i. A part with more goes in further
rounds, each a run of ranks in the order of the slots: how many rounds there are follows
from the fullest part, on which all ranks agreed. So nothing is lost, and no message size is
a branch of the program.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.reference.ordered import add_senders
from sparsejax.axes import as_varying, axis_names, by_platform
from sparsejax.errors import ArgumentError
from sparsejax.units import bits
from sparsejax.units.slots import Slots
from sparsejax.units.units import Source
from sparsejax.wire import forms, index_codes
from sparsejax.wire.collectives import Wire
from sparsejax.wire.forms import Values
from sparsejax.wire.ladder import Ladder
from sparsejax.wire.messages import Fold


class Places(NamedTuple):
    """Where the parts of messages begin, and how their slots travel; int32, one a message.

    Attributes:
        string: Words of the string or the bitmap, at which the lanes begin.
        lane: Words of the lowest bytes of the slots, and of each further byte.
        planes: How many bytes of each slot are sent as they are.
        values: Where the values begin.
        length: Words of the whole message.
        has_string: 1 where a string or a bitmap is sent, else 0.
    """

    string: jax.Array
    lane: jax.Array
    planes: jax.Array
    values: jax.Array
    length: jax.Array
    has_string: jax.Array


class Form(Values):
    """How long messages are, and where their parts begin, for any number of entries.

    Attributes:
        width: Slots in a part.
        room: Entries in the longest message, a multiple of 4.
        rows: How many messages a buffer has.
        codes: The index codes that messages may have.
        longest: Words of the longest string or bitmap.
        words: Words of the longest message.
    """

    def __init__(
        self,
        ladder: Ladder,
        codes: str,
        shape: tuple[int, ...],
        dtype: Any,
        rows: int,
        capacity: str | None = None,
    ):
        """A form for parts of the width of a ladder, with room for its longest message.

        Args:
            ladder: The message sizes of a channel that has them.
            codes: The index code, or "auto" for the shortest for each message.
            shape: Of one value.
            dtype: Of the values while they travel.
            rows: How many messages a buffer has.
            capacity: The name of the argument that asked for so much room; None if none
                did, and less will do.
        """
        super().__init__(shape, dtype)
        self.width, self.rows = ladder.width, rows
        allowed = index_codes.parse(codes)
        self.room = self._fitting(ladder.top, allowed, capacity)
        # A code that is the shortest for no count need not be written or read.
        counts = {1, *(max(1, self.room >> k) for k in range(31))}
        best = {self._cheapest(count, allowed) for count in counts}
        self.codes = tuple(code for code in allowed if code in best)
        strings = [code.string_words(self.room, self.width) for code in self.codes]
        self.longest = max(1, *strings)
        self.words = self._words(self.room, self.codes)

    def _fitting(self, room, allowed, capacity):
        """As much of the room as int32 can number the words of."""
        most = forms.MOST_FLAT // self.rows
        if self._words(room, allowed) <= most:
            return room
        each = self.unit_words(4) + 4  # of four entries, their slots as COO
        string = min(code.string_words(0, self.width) for code in allowed)
        fits = 4 * ((most - string) // each)
        if capacity is not None or fits < 4:
            raise ArgumentError(
                f"channel='ragged' has {self.rows} messages in a buffer, each with room "
                f"for {room:,} entries or {self._words(room, allowed):,} words, more than "
                f"int32 can number: set {capacity or 'the capacity'} to "
                f"{max(fits, 1):,} or less, or use channel='ladder'."
            )
        return fits

    def _words(self, count: int, codes) -> int:
        """Words of a message of so many entries, a Python number."""
        code = self._cheapest(count, codes)
        return _index_words(code, count, self.width) + self.value_words(count)

    def _cheapest(self, count, codes):
        return min(codes, key=lambda code: _index_words(code, count, self.width))

    def value_words(self, count: Any) -> Any:
        """Words of the values of so many entries."""
        if self.dtype.itemsize >= 4:
            return count * (self.unit_words(4) // 4)
        return (count * (self.unit_words(4) // 2) + 1) // 2

    def places(self, counts: jax.Array) -> Places:
        """Where the parts of messages of so many entries begin: of the shortest code."""
        words, string, planes = self._of_code(self.codes[0], counts)
        for code in self.codes[1:]:
            # Compared one by one: a search for the least of them is a kernel by itself.
            others = self._of_code(code, counts)
            is_less = others[0] < words
            pairs = zip(others, (words, string, planes), strict=True)
            words, string, planes = (jnp.where(is_less, a, b) for a, b in pairs)
        there = counts > 0
        string = jnp.where(there, string, 0)
        lane = (counts + 3) >> 2
        values = string + planes * lane
        length = values + self.value_words(counts)
        return Places(string, lane, planes, values, length, (string > 0).astype(jnp.int32))

    def _of_code(self, code, counts):
        """Words of the slots of messages, those of their strings, and bytes of a slot."""
        string = jnp.broadcast_to(code.string_words(counts, self.width), counts.shape)
        return _index_words(code, counts, self.width), string, jnp.int32(code.planes)

    def lengths(self, counts: jax.Array) -> jax.Array:
        """Words of messages of so many entries, at most `room`."""
        return self.places(counts).length

    def bytes(self, counts: jax.Array) -> jax.Array:
        """Bytes of the messages, in as many rounds as it takes, for each count: float32."""
        full, rest = self._rounds(counts)
        whole = np.float32(self._words(self.room, self.codes))
        words = full.astype(jnp.float32) * whole + self.lengths(rest).astype(jnp.float32)
        return 4 * words

    def mean_bytes(self, count: float) -> float:
        """`bytes` of a part of a count that is a mean, as a Python number."""
        low = int(count)
        below, above = self._bytes_of(low), self._bytes_of(low + 1)
        return below + (count - low) * (above - below)

    def _bytes_of(self, count):
        full, rest = divmod(count, self.room)
        words = full * self._words(self.room, self.codes)
        return 4.0 * (words + (self._words(rest, self.codes) if rest else 0))

    def needed_bytes(self, counts: jax.Array) -> jax.Array:
        """Bytes that they need, the ends of their parts not rounded up: float32."""
        full, rest = self._rounds(counts)
        whole = self._needed(jnp.full_like(counts, self.room))
        return full.astype(jnp.float32) * whole + self._needed(rest)

    def _rounds(self, counts):
        """How many full rounds parts have, and what is left for another."""
        room = np.int32(self.room)
        return lax.div(counts, room), lax.rem(counts, room)

    def _needed(self, counts):
        codes = [code.needed_bits(counts, self.width) for code in self.codes]
        least = functools.reduce(jnp.minimum, codes)
        values = np.float32(self.unit_words(4)) * counts.astype(jnp.float32)
        needed = least / 8 + values
        return jnp.where(counts > 0, needed, 0)


def _index_words(code: index_codes.IndexCode, count: Any, width: int) -> Any:
    """Words of the slots of so many entries."""
    lanes = code.lane_words(4 * ((count + 3) >> 2))
    return lanes + code.string_words(count, width)


def pack(
    form: Form,
    slots: Slots,
    source: Source,
    first: jax.Array,
    here: jax.Array,
    axes: frozenset[str],
) -> jax.Array:
    """Writes a run of ranks of each part into a message of its own: uint32 [parts, words].

    Args:
        form: Where the parts of a message are.
        slots: The slots of each part.
        source: Their values.
        first: The rank of the first slot.
        here: int32 [parts], how many slots of each part are sent, at most `form.room`.
        axes: The mesh axes over which messages vary.
    """
    parts, room = len(slots.counts), form.room
    part = lax.broadcasted_iota(jnp.int32, (parts, 1), 0)
    found, _ = bits.slots_of(slots.words, first, room, slots.counts)
    units = found if source.units is None else source.units(part, found)
    here = here[:, None]
    places = form.places(here)
    rank = lax.iota(jnp.int32, room)
    # The string first, since its bits are added up; all else is looked up word by word.
    bit = (found >> _shift(places)) + _has_lanes(places) * rank
    word = part * form.words + (bit >> 5)
    is_told = (rank < here) & (places.has_string > 0)
    word = jnp.where(is_told, word, parts * form.words)
    mark = jnp.uint32(1) << (bit & (bits.WORD - 1)).astype(jnp.uint32)
    message = as_varying(jnp.zeros(parts * form.words, jnp.uint32), axes)
    message = message.at[word].add(mark, mode="drop", wrap_negative_indices=False)
    message = message.reshape(parts, form.words)

    column = lax.iota(jnp.int32, form.words)
    for plane in range(max(code.planes for code in form.codes)):
        octets = index_codes.to_bytes(found, plane)
        at = column - (places.string + plane * places.lane)
        inside = (at >= 0) & (at < places.lane) & (plane < places.planes)
        message = jnp.where(inside, forms.taken(octets, at), message)
    values = form.to_words(source.read(units).astype(form.dtype))
    at = column - places.values
    return jnp.where(at >= 0, forms.taken(values, at), message)


def unpack(form: Form, message: jax.Array, here: jax.Array, fold: Fold, carry: Any) -> Any:
    """Folds the entries of the messages received.

    Args:
        form: Where the parts of a message are.
        message: uint32 [senders, words]; what lies behind a message is not looked at.
        here: int32 [senders], how many entries each has.
        fold: What is made of the entries: in order only where they are added.
        carry: The result so far.
    """
    room, here = form.room, here[:, None]
    places = form.places(here)
    used = lax.iota(jnp.int32, form.longest) < places.string
    strings = jnp.where(used, message[:, : form.longest], 0)
    ones = (here * places.has_string)[:, 0]
    found, _ = bits.slots_of(strings, jnp.int32(0), room, ones)
    rank = lax.iota(jnp.int32, room)
    # The slots of a bitmap; of another code their blocks, if there are several.
    block = (found - _has_lanes(places) * rank) * places.has_string
    slots = block << _shift(places)
    for plane in range(max(code.planes for code in form.codes)):
        begin = places.string + plane * places.lane
        octets = index_codes.from_bytes(
            forms.taken(message, begin + lax.iota(jnp.int32, room // 4)), plane
        )
        slots = slots | octets * (plane < places.planes)
    slots = jnp.where(rank < here, slots, form.width)
    at = places.values + lax.iota(jnp.int32, form.unit_words(room))

    def at_once():
        values = form.from_words(forms.taken(message, at), room)
        sender = lax.broadcasted_iota(jnp.int32, slots.shape, 0).reshape(-1)
        values = values.reshape(-1, *form.shape)
        return fold.add(carry, sender, slots.reshape(-1), values)

    def in_order():
        of = lambda x, sender: lax.dynamic_slice_in_dim(x, sender, 1)
        words = lambda sender: forms.taken(of(message, sender), of(at, sender))
        values = lambda sender: form.from_words(words(sender), room)[0]
        return add_senders(carry, slots, values)

    if not fold.in_order:
        return at_once()
    assert fold.into is not None
    assert fold.into.units is None
    assert not fold.into.replaces
    return by_platform(cpu=at_once, default=in_order)


def _has_lanes(places):
    return (places.planes > 0).astype(jnp.int32)


def _shift(places):
    # With all bits of a slot in lanes there is no string to ask.
    return jnp.minimum(8 * places.planes, 30)


class Ragged(NamedTuple):
    """An exchange of messages as long as what is there.

    Attributes:
        form: Where the parts of a message are.
        wire: The ranks.
        slots: The slots of each part that this rank sends: one part for each rank, or a
            single one that goes to all.
        source: The values of the slots.
        coming: int32 [ranks], how many entries each rank has for this one.
        fold: What is made of the entries that arrive, all of a round at once.
    """

    form: Form
    wire: Wire
    slots: Slots
    source: Source
    coming: jax.Array
    fold: Fold

    @property
    def start(self) -> Any:
        """The result where nothing arrives."""
        same = axis_names(self.wire.axis) if self._to_all else ()
        return as_varying(self.fold.start, self._axes - frozenset(same))

    @property
    def _axes(self):
        return self.slots.axes | self.source.axes

    @property
    def _to_all(self):
        return len(self.slots.counts) == 1

    def once(self, first: jax.Array | int = 0, carry: Any = None) -> Any:
        """Sends up to `room` entries of each part, from the rank `first` on, and folds."""
        first = jnp.asarray(first, jnp.int32)
        run = lambda counts: jnp.clip(counts - first, 0, self.form.room)
        here, there = run(self.slots.counts), run(self.coming)
        message = pack(self.form, self.slots, self.source, first, here, self._axes)
        sizes = jnp.broadcast_to(self.form.lengths(here), self.wire.ranks)
        received, _ = self.wire.ragged(message, sizes, self.form.lengths(there))
        if self._to_all:
            received = self.wire.assume_same(received)
        carry = self.start if carry is None else carry
        return unpack(self.form, received, there, self.fold, carry)

    def several(self, need: jax.Array) -> Any:
        """Sends all in rounds; `need` is the fullest part of all ranks, equal on all."""

        def turn(state):
            first, carry = state
            return first + self.form.room, self.once(first, carry)

        more = lambda state: state[0] < need
        return lax.while_loop(more, turn, (jnp.int32(0), self.start))[1]
