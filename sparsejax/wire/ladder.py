"""The ladder of message sizes, from which a program chooses when it runs.

XLA fixes the size of every buffer at compile time, but the number of entries of a gradient
is known only at run time. So a program has a branch for each size of a ladder, which holds
nothing but the collective, and takes the lowest rung that holds the fullest part of all
ranks. If the top rung is too small, further rounds send the rest. A lower rung and a second
round are also taken where they save more bytes than a round is worth. Packing and unpacking
are compiled once.

Rungs of ratio f waste (f - 1)/ln f - 1 of the bytes in one round, on average: 17% at 1.35,
and 44% at 2. That is the default, since second rounds reduce the waste of long messages.
The top rung holds a quarter of a part, at most 4 MB, or a 32nd of arrays above 128 MB: so
rounds stay few, and buffers small beside the array. The bottom rung is a message so short
that its bytes no longer matter.

On GPUs each round, and each decision for another one, waits for the host, so a second round
is taken only for entries beyond the top rung. The top rung therefore holds a sixth of the
array, or a 32nd of what goes to owners. Rungs near it differ by an eighth, which wastes 6%.
Buffers are as large as the top rung, whatever is sent; where Triton kernels unpack, they
are as large as one piece of a message. The bottom rung is where all messages of a rank take
64 KB together.

Two alternatives were worse. A ladder whose branches hold the whole exchange compiled in
13 s with five rungs. Rounds of one fixed size waste most of a round at low density, or need
hundreds of rounds at high density.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import arguments
from sparsejax.wire import collectives, index_codes
from sparsejax.wire.channels import Route
from sparsejax.wire.index_codes import IndexCode
from sparsejax.wire.sizes import Count, Sizes, numpy_of


_LANES = 4  # capacities are multiples of this, so that lanes and values fill whole words
# The bytes that a thread of a GPU moves at a time, if they are aligned. Where values are a
# multiple of it, as rows are, up to three words of padding after a string align them. On
# CPUs strings are not padded.
_ALIGNED = 16
_SHORT = 1024  # bytes of a message below which its latency is all that it costs
# The bytes that are sent in the time of a round: 80 us at 25 Gbit/s, or 8 ms at 250 Mbit/s.
# A round takes that long with NCCL (not measured here), and with gloo between 16 hosts
# (measured).
ROUND = 1 << 18
# Bytes of the values in a rank's messages above which another round hardly weighs.
_TOP = 16 * ROUND
# Bytes of all messages of a rank, on GPUs, below which their number does not matter.
_FEW = ROUND // 4
# The longest messages hold one unit in this many of a large array, so that buffers stay
# small beside it, and rounds few.
_SHARE = 32
# On GPUs the pieces of messages of all senders together hold one unit in this many, but no
# fewer bytes than are sent in the time of a round.
_SHARE_OF_PIECE = 24
# On GPUs the longest messages hold one unit in this many of an array of any size, where
# they carry sums or go to all ranks.
_SHARE_AT_ONCE = 6
# Where no message is followed by another, the ratio of long rungs, and the divisor down to
# which rungs are long: a third of the longest, since each rung is a branch to compile.
_CLOSE, _NEAR = 2 ** (1 / 6), 3
# The ratio of the sizes of the last message of several, down to about half of the longest:
# a need that just exceeds the longest message takes half as many bytes again.
_FINAL = 1.38
# Bounds for the entries of a part that are packed at a time, and for the numbers of their
# values: a tile fits the caches, and hides the overhead of a loop's turn. Fewer parts have
# larger tiles, since a step with few entries still packs one whole tile of each part.
_LEAST_TILE, _TILES = 1 << 13, 1 << 17
_TILE_NUMBERS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Rung:
    """One message size.

    Attributes:
        capacity: The number of entries.
        code: The index code of their slots.
        string: The words of the bit string, or of the bitmap.
        words: The words of the whole message.
    """

    capacity: int
    code: IndexCode
    string: int
    words: int

    @classmethod
    def of(
        cls, capacity: int, width: int, unit_bytes: int, codes: Iterable[IndexCode]
    ) -> "Rung":
        """Returns the message size for a number of entries, in the cheapest of some codes.

        Args:
            capacity: The number of entries, a multiple of 4.
            width: The number of slots of a part.
            unit_bytes: Bytes of the value of one unit on the wire.
            codes: The index codes that are allowed.
        """
        code = index_codes.cheapest(capacity, width, codes)
        string, lanes = code.string_words(capacity, width), code.lane_words(capacity)
        is_aligned = unit_bytes > 0 and unit_bytes % _ALIGNED == 0
        if collectives.at_once() and string and is_aligned:
            string += -(1 + string + lanes) % (_ALIGNED // 4)
        words = 1 + string + lanes + capacity * unit_bytes // 4
        return cls(capacity, code, string, words)


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Message sizes for the parts of one exchange.

    Attributes:
        width: The number of slots of a part.
        unit_bytes: Bytes of the value of one unit on the wire.
        tile: The number of entries of a part that are packed or unpacked at a time on CPUs.
        rungs: The message sizes, from the shortest to the longest.
        at_once: Whether one message holds all entries, unless they exceed the top rung.
        piece: The approximate number of words of a piece of a message. Longer messages are
            sent in several pieces, each unpacked before the next is sent. If None, messages
            are not split.
    """

    width: int
    unit_bytes: int
    tile: int
    rungs: tuple[Rung, ...]
    at_once: bool = False
    piece: int | None = None

    def pieces_of(self, rung: Rung) -> int:
        """Returns the number of pieces in which the values of a message are sent."""
        return 1 if self.piece is None else max(1, round(rung.words / self.piece))

    def is_long(self, rung: Rung) -> bool:
        """Whether a message has more than a third of the entries of the longest."""
        return _NEAR * rung.capacity > self.top

    @property
    def top(self) -> int:
        """The capacity of the longest message, in entries."""
        return self.rungs[-1].capacity

    def rung(self, need: Count) -> Any:
        """Returns the number of the lowest rung for `need` entries, or of the top rung."""
        return self.sizes.number(need)

    @functools.cached_property
    def sizes(self) -> Sizes:
        """The capacities of the rungs."""
        return Sizes(tuple(rung.capacity for rung in self.rungs), self.at_once)

    @functools.cached_property
    def finals(self) -> tuple[int, ...]:
        """The numbers of the rungs that a last message of several may have, at once.

        Each is a branch to compile. So their ratio is at least `_FINAL`, and the lowest has
        about half the capacity of the top rung, or less.
        """
        numbers = [len(self.rungs) - 1]
        for number, rung in reversed(list(enumerate(self.rungs))):
            lowest = self.rungs[numbers[-1]].capacity
            if lowest > 0.6 * self.top and _FINAL * rung.capacity <= lowest:
                numbers.append(number)
        return tuple(reversed(numbers))

    def final(self, need: Count) -> tuple[Any, Any]:
        """Returns the rung of the last message of several, for `need` entries.

        Returns:
            The place of the rung in `finals`, and its number in `rungs`.
        """
        rooms = tuple(self.rungs[number].capacity for number in self.finals)
        place = Sizes(rooms, self.at_once).number(need)
        return place, numpy_of(need).array(self.finals, np.int32)[place]

    def next_message(self, need: jax.Array, messages: int) -> tuple[jax.Array, jax.Array]:
        """Returns the rung of the next message, and the number of entries that it takes.

        That is the lowest rung that holds all entries left, or the rung below it, where
        this and a further message for the rest save more bytes than a round is worth.

        Args:
            need: int32 [], the entries left of the fullest part.
            messages: The number of messages that a rank sends in a round.
        """
        room = jnp.array([rung.capacity for rung in self.rungs], jnp.int32)
        below = jnp.array(self._bounds(messages)) < need
        rung = jnp.sum(below, dtype=jnp.int32) >> 1
        return rung, jnp.minimum(need, room[rung])

    def _bounds(self, messages: int) -> np.ndarray:
        """Returns the most entries for which each rung is taken: alone, and followed.

        They are in the order 0 alone, 0 followed by another, 1 alone, 1 followed, and so
        on; the top rung has no bound. Half the number of bounds below a need is its rung.
        """
        words = np.array([rung.words for rung in self.rungs], np.float32)
        bounds = []
        for low, rung in enumerate(self.rungs[:-1]):
            # In float32 and in this order, so that all ranks make equal choices.
            saved = np.float32(4.0 * messages) * (words[low + 1] - words[low] - words)
            pays = saved > ROUND
            rest = [r.capacity for r, p in zip(self.rungs, pays, strict=True) if p]
            followed = rung.capacity + max(rest, default=0)
            if low + 2 < len(self.rungs):
                followed = min(followed, self.rungs[low + 1].capacity)
            bounds += [rung.capacity, followed]
        return np.array(bounds, np.int32)

    def messages_for(self, need: int, messages: int) -> list[Rung]:
        """Returns the rungs of all messages for `need` entries, a Python number.

        In rounds they are those of `next_message`, one for each round.
        """
        bounds, taken = self._bounds(messages), []
        while need > 0:
            rung = self.rung(need) if self.at_once else np.sum(bounds < need) >> 1
            taken.append(self.rungs[rung])
            need -= taken[-1].capacity
        if self.at_once and len(taken) > 1:
            finals = [self.rungs[i] for i in self.finals]
            taken[-1] = next(r for r in finals if r.capacity >= taken[-1].capacity)
        return taken

    def sent(self, need: int, route: Route) -> tuple[float, int, int]:
        """Returns bytes, number and largest capacity of the messages for `need` entries.

        `need` is a Python number. `messages.transmit` reports the same bytes.
        """
        taken = self.messages_for(need, route.messages)
        capacity = max((rung.capacity for rung in taken), default=0)
        return sum(route.bytes(rung.words) for rung in taken), len(taken), capacity

    def bytes(self, need: Count) -> Any:
        """Returns the bytes of the fewest messages for `need` entries, as float32.

        The messages that `next_message` chooses have no more. A Python number is evaluated
        in NumPy's float32, so that a forecast decides as the program does.
        """
        xp, top = numpy_of(need), np.int32(self.top)
        if isinstance(need, jax.Array):
            full, rest = lax.div(need, top).astype(jnp.float32), lax.rem(need, top)
        else:
            full, rest = map(int, divmod(int(need), self.top))
            full = np.float32(full)
        table = xp.array([4.0 * rung.words for rung in self.rungs], np.float32)
        last = xp.where(rest > 0, table[self.rung(rest)], np.float32(0))
        if self.at_once:
            follows = (need > self.top) & (rest > 0)
            last = xp.where(follows, table[self.final(rest)[1]], last)
        return full * table[-1] + last

    def needed_bytes(
        self, count: jax.typing.ArrayLike, rung: jax.typing.ArrayLike
    ) -> jax.Array:
        """Returns the bytes that `count` entries need in a rung's code, without padding."""
        count = jnp.asarray(count, jnp.float32)
        terms = [rung.code.needed_terms(self.width) for rung in self.rungs]
        lane, each, blocks = jnp.array(terms, jnp.float32)[rung]
        header = 4.0
        index_bits = lane * count + (each * count + blocks)
        return header + index_bits / 8 + self.unit_bytes * count


@dataclasses.dataclass(frozen=True)
class Message:
    """The options of the messages of one stage, from which its ladder is built.

    Attributes:
        code: The name of the index code, or "auto" for the cheapest at each message size.
        ratio: The ratio of successive message sizes; a larger one compiles faster and pads
            more.
        capacity: The capacity of the longest message, if the number of entries is roughly
            known. Entries that do not fit are sent in further rounds. If None, it follows
            from the size of the array, as the docstring of this module describes.
    """

    code: str = "auto"
    ratio: float = 2.0
    capacity: int | None = None

    def ladder(
        self,
        width: int,
        unit_bytes: int,
        parts: int,
        units: int | None = None,
        share: int = _SHARE_AT_ONCE,
    ) -> Ladder:
        """Builds the ladder for parts of `width` slots.

        Args:
            width: The number of slots of a part, a multiple of 32.
            unit_bytes: Bytes of one unit's value on the wire.
            parts: The number of parts that a rank packs or unpacks at once.
            units: The number of units of the array; width * parts if None.
            share: On GPUs, the longest messages of all parts together hold one unit in
                `share`.
        """
        allowed = index_codes.parse(self.code)
        at_once = collectives.at_once()
        units = units or width * parts
        # unit_bytes is 0 where messages have slots and no values.
        most = max(_TOP // max(unit_bytes, 1), units // _SHARE)
        if at_once:
            most = max(ROUND // max(unit_bytes, 1), units // share)
        top = min(self.capacity or max(min(width // 4, most // parts), 128), width)
        top = _multiple(max(top, 1), _LANES)
        rungs: list[Rung] = []
        wanted = float(top)
        while True:
            room = min(top, _multiple(math.ceil(wanted), _LANES))
            rung = Rung.of(room, width, unit_bytes, allowed)
            if not rungs or rung.words < rungs[-1].words:
                rungs.append(rung)
            size = 4 * rung.words
            is_short = size <= _SHORT or (at_once and size * parts <= _FEW)
            if is_short or room <= _LANES:
                break
            is_long = at_once and size * parts > ROUND and _NEAR * wanted > top
            wanted /= min(self.ratio, _CLOSE) if is_long else self.ratio
        tile = _tile(top, unit_bytes, max(_TILES // parts, _LEAST_TILE))
        # Pieces are for messages that go to all ranks. Messages to owners are short, and a
        # rank receives no more of them than it sends.
        piece = max(top * share // _SHARE_OF_PIECE * unit_bytes, ROUND // parts) // 4
        pieces = piece if at_once and share < _SHARE_OF_PIECE else None
        return Ladder(width, unit_bytes, tile, tuple(reversed(rungs)), at_once, pieces)


def exactly(
    width: int,
    unit_bytes: int,
    capacity: int,
    codes: str = "auto",
    least: int | None = None,
    ratio: float = 1.2,
) -> Ladder:
    """Builds the ladder for a known number of entries: one rung, or a few down to `least`.

    Args:
        width: The number of slots of a part, a multiple of 32.
        unit_bytes: Bytes of one unit's value on the wire.
        capacity: The number of entries of a message.
        codes: The index code, or "auto" for the cheapest.
        least: A lower bound of the number of entries, down to which there are rungs; None
            if the number is exactly `capacity`.
        ratio: The ratio of successive rungs.
    """
    allowed = index_codes.parse(codes)
    top = _multiple(max(1, min(capacity, width)), _LANES)
    rooms = [top]
    while rooms[-1] > (top if least is None else _multiple(least, _LANES)):
        rooms.append(min(rooms[-1] - _LANES, _multiple(int(rooms[-1] / ratio), _LANES)))
    rungs = tuple(Rung.of(room, width, unit_bytes, allowed) for room in reversed(rooms))
    tile = _tile(top, unit_bytes, _LEAST_TILE)
    return Ladder(width, unit_bytes, tile, rungs, collectives.at_once())


def _tile(top: int, unit_bytes: int, most: int) -> int:
    """Returns the length of a tile: `top` entries in equal tiles of at most `most`."""
    numbers = max(1, unit_bytes // 4)
    tile = min(top, _multiple(max(1, min(most, _TILE_NUMBERS // numbers)), _LANES))
    tiles = -(-top // tile)
    return _multiple(-(-top // tiles), _LANES)


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def check_capacity(name: str, capacity: int | None) -> None:
    """Raises unless the capacity is a positive integer or None."""
    if capacity is not None:
        arguments.check_whole(name, capacity, 1, " or None")


def check_ratio(ratio: float) -> None:
    """Raises unless the ratio of successive rungs is between 1.05 and 64."""
    why = (
        "It is the step from one message size to the next: a smaller one pads less in one "
        "round, and compiles longer."
    )
    arguments.check_between("ratio", ratio, 1.05, 64, why)
