"""The message sizes a program may choose from when it runs.

XLA fixes every buffer when it compiles, and how many entries a gradient has is known only
at run time. So a program is compiled with a ladder of message sizes, each a branch
that holds nothing but the collective, and takes the lowest rung that all ranks' fullest
parts fit. Above the top rung it repeats with what is left, and so it does where a
lower rung and a second round save more bytes than a round is worth. What is compiled once
is the work.

Rungs whose ratio is f waste (f - 1)/ln f - 1 in one round, on average: 17% at 1.35, 44% at
2, the default, where second rounds bring it down again once messages are long. The top rung
holds a quarter of a part, of large arrays 4 MB, and of those above 128 MB a 32nd: so rounds
stay few, and buffers small beside the array. The bottom one is where a message is so short
that its bytes no longer matter.

On GPUs each round, and each look for another, asks the host: a second round is taken for
what exceeds the top rung alone. So the top rung holds a sixth of the array, of what goes
to owners a 32nd, those near it differ by an eighth, which wastes 6%, and buffers are as
large as the top rung, whatever is sent; where kernels of ours unpack, as a piece of what is
sent. The bottom one is where all messages of a rank take 64 KB together.

Tried before: a ladder whose branches hold the whole exchange compiled in 13 s with five
rungs, and rounds of one fixed size waste most of a round at low density or need hundreds of
rounds at high density.
"""

import dataclasses
import functools
import math
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
_SHORT = 1024  # bytes; a shorter message costs its latency
# Bytes that take as long as a round: 25 Gbit/s for 80 us, 250 Mbit/s for 8 ms, which are
# what a round took with NCCL (not measured here) and gloo between 16 hosts (measured).
ROUND = 1 << 18
# Bytes of the values in a rank's messages above which another round hardly weighs.
_TOP = 16 * ROUND
# Bytes of all messages of a rank below which, on GPUs, it does not matter how many.
_FEW = ROUND // 4
# The share of a larger array: buffers for messages stay small beside it, and rounds few.
_SHARE = 32
# On GPUs a piece of a message, of all senders, holds one unit in this many, but no fewer
# bytes than take as long as a round.
_SHARE_OF_PIECE = 24
# The share of any array on GPUs, where messages are sums or go to all.
_SHARE_AT_ONCE = 6
# The step from one long message to the next where none is followed by another: down to a
# third of the longest, since each is a branch to compile.
_CLOSE, _NEAR = 2 ** (1 / 6), 3
# The ratio of the sizes of a message that follows others, down to about half of the
# longest: what just exceeds one message sends half as much more.
_FINAL = 1.38
# Entries of a part that are packed at a time, and numbers of all their values: they fill
# the caches, and hide the overhead of a turn. Tiles are the larger the fewer parts there
# are: one of each part is what a step works on that has next to nothing to send.
_LEAST_TILE, _TILES = 1 << 13, 1 << 17
_TILE_NUMBERS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Rung:
    """One message size: room for `capacity` entries, their slots in `code`."""

    capacity: int
    code: IndexCode
    words: int


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Message sizes for the parts of one exchange.

    Attributes:
        width: Slots in a part.
        unit_bytes: Bytes of the value of one unit, as it travels.
        tile: Entries of a part that are packed or unpacked at a time on CPUs.
        rungs: From the shortest message to the longest.
        at_once: Whether all goes in one message, but for what exceeds the longest.
        piece: Words of a piece of a message, about: a longer message goes in several, where
            a piece is unpacked before the next is sent. None: all go whole.
    """

    width: int
    unit_bytes: int
    tile: int
    rungs: tuple[Rung, ...]
    at_once: bool = False
    piece: int | None = None

    def pieces_of(self, rung: Rung) -> int:
        """In how many pieces the values of a message go."""
        return 1 if self.piece is None else max(1, round(rung.words / self.piece))

    def is_long(self, rung: Rung) -> bool:
        """Whether a message has more than a third of the entries of the longest."""
        return _NEAR * rung.capacity > self.top

    @property
    def top(self) -> int:
        """Entries in the longest message."""
        return self.rungs[-1].capacity

    def rung(self, need: Count) -> Any:
        """The lowest rung with room for `need` entries; the top one if none has."""
        return self.sizes.number(need)

    @functools.cached_property
    def sizes(self) -> Sizes:
        """The capacities of the rungs."""
        return Sizes(tuple(rung.capacity for rung in self.rungs), self.at_once)

    @functools.cached_property
    def finals(self) -> tuple[int, ...]:
        """The numbers of the rungs of messages that follow others, where all goes at once.

        Each is a branch to compile: their ratio is `_FINAL`, and the lowest holds about
        half, or less.
        """
        numbers = [len(self.rungs) - 1]
        for number, rung in reversed(list(enumerate(self.rungs))):
            lowest = self.rungs[numbers[-1]].capacity
            if lowest > 0.6 * self.top and _FINAL * rung.capacity <= lowest:
                numbers.append(number)
        return tuple(reversed(numbers))

    def final(self, need: Count) -> tuple[Any, Any]:
        """The rung of a message for `need` entries that follows others.

        Returns:
            Its place in `finals`, and its number.
        """
        rooms = tuple(self.rungs[number].capacity for number in self.finals)
        place = Sizes(rooms, self.at_once).number(need)
        return place, numpy_of(need).array(self.finals, np.int32)[place]

    def next_message(self, need: jax.Array, messages: int) -> tuple[jax.Array, jax.Array]:
        """The rung of the next message where `need` entries are left, and its entries.

        The lowest rung that holds them all; but where a lower one, and then one for the
        rest, save more bytes than a round is worth, the lower one.

        Args:
            need: Entries of the fullest part.
            messages: How many messages a rank sends in a round.
        """
        room = jnp.array([rung.capacity for rung in self.rungs], jnp.int32)
        below = jnp.array(self._bounds(messages), jnp.int32) < need
        rung = jnp.sum(below, dtype=jnp.int32) >> 1
        return rung, jnp.minimum(need, room[rung])

    def _bounds(self, messages: int) -> list[int]:
        """The most entries for which each rung is taken: alone, and followed by another.

        In the order 0 alone, 0 followed, 1 alone, 1 followed, and so on; the top rung has
        no bound. So one comparison with them all says which rung is next.
        """
        words = np.array([rung.words for rung in self.rungs], np.float32)
        bounds = []
        for low, rung in enumerate(self.rungs[:-1]):
            # As float32, and in this order, so that what is chosen is the same everywhere.
            saved = np.float32(4.0 * messages) * (words[low + 1] - words[low] - words)
            pays = saved > ROUND
            rest = [r.capacity for r, p in zip(self.rungs, pays, strict=True) if p]
            followed = rung.capacity + max(rest, default=0)
            if low + 2 < len(self.rungs):
                followed = min(followed, self.rungs[low + 1].capacity)
            bounds += [rung.capacity, followed]
        return bounds

    def messages_for(self, need: int, messages: int) -> list[Rung]:
        """The rungs that `next_message` takes, a round each, for a Python number."""
        taken = []
        while need > 0:
            high = self.sizes.number(need)
            low = max(high - 1, 0)
            room = self.rungs[low].capacity
            rest = self.sizes.number(max(need - room, 0))
            words = [self.rungs[i].words for i in (high, low, rest)]
            saved = 4 * messages * (words[0] - words[1] - words[2])
            followed = room < need and saved > ROUND and not self.at_once
            taken.append(self.rungs[low if followed else high])
            need -= taken[-1].capacity
        if self.at_once and len(taken) > 1:
            finals = [self.rungs[i] for i in self.finals]
            taken[-1] = next(r for r in finals if r.capacity >= taken[-1].capacity)
        return taken

    def sent(self, need: int, route: Route) -> tuple[float, int, int]:
        """Bytes of the messages that send `need` entries of a part, rounds, and capacity.

        What a transmission reports, for a Python number.
        """
        taken = self.messages_for(need, route.messages)
        capacity = max((rung.capacity for rung in taken), default=0)
        return sum(route.bytes(rung.words) for rung in taken), len(taken), capacity

    def bytes(self, need: Count) -> Any:
        """Bytes of the fewest messages that send `need` entries of a part, as float32.

        What `next_message` chooses sends no more. A Python number is evaluated in
        NumPy, so that a forecast decides as the program does.
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
        """Bytes that `count` entries need in the code of a rung, padding left out."""
        count = jnp.asarray(count, jnp.float32)
        terms = [rung.code.needed_terms(self.width) for rung in self.rungs]
        lane, each, blocks = jnp.array(terms, jnp.float32)[rung]
        header = 4.0
        index_bits = lane * count + (each * count + blocks)
        return header + index_bits / 8 + self.unit_bytes * count


@dataclasses.dataclass(frozen=True)
class Message:
    """How the entries of one way travel.

    Attributes:
        code: How indices travel: the name of a code, or "auto" for the cheapest at each
            message size.
        ratio: The ratio of successive message sizes; a larger one compiles faster and pads
            more.
        capacity: Entries of the longest message, where it is known what to expect; what
            does not fit goes in further rounds. What the module says if None.
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
            width: Slots in a part, a multiple of 32.
            unit_bytes: Bytes of one unit's value on the wire.
            parts: How many parts a rank packs or unpacks at once.
            units: Units of the array, where they are not as many as parts have slots.
            share: On GPUs the longest messages of a rank, or of all, hold one unit in
                `share`.
        """
        allowed = index_codes.parse(self.code)
        at_once = collectives.at_once()
        units = units or width * parts
        # A message may have slots alone.
        most = max(_TOP // max(unit_bytes, 1), units // _SHARE)
        if at_once:
            most = max(ROUND // max(unit_bytes, 1), units // share)
        top = min(self.capacity or max(min(width // 4, most // parts), 128), width)
        top = _multiple(max(top, 1), _LANES)
        rungs: list[Rung] = []
        wanted = float(top)
        while True:
            room = min(top, _multiple(math.ceil(wanted), _LANES))
            code = index_codes.cheapest(room, width, allowed)
            words = 1 + code.words(room, width) + room * unit_bytes // 4
            if not rungs or words < rungs[-1].words:
                rungs.append(Rung(room, code, words))
            is_short = 4 * words <= _SHORT or (at_once and 4 * words * parts <= _FEW)
            if is_short or room <= _LANES:
                break
            is_long = at_once and 4 * words * parts > ROUND and _NEAR * wanted > top
            wanted /= min(self.ratio, _CLOSE) if is_long else self.ratio
        tile = _tile(top, unit_bytes, max(_TILES // parts, _LEAST_TILE))
        # Of what goes to owners a rank receives no more than it sends, which is little.
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
    """The ladder where it is known how many entries there are: one rung, for these.

    Args:
        width: Slots in a part, a multiple of 32.
        unit_bytes: Bytes of one unit's value on the wire.
        capacity: Entries in a message.
        codes: The index code, or "auto" for the cheapest.
        least: The fewest entries, where there may be fewer; rungs then go down to these.
        ratio: The ratio of successive rungs.
    """
    allowed = index_codes.parse(codes)
    top = _multiple(max(1, min(capacity, width)), _LANES)
    rooms = [top]
    while rooms[-1] > (top if least is None else _multiple(least, _LANES)):
        rooms.append(min(rooms[-1] - _LANES, _multiple(int(rooms[-1] / ratio), _LANES)))
    rungs = []
    for room in reversed(rooms):
        code = index_codes.cheapest(room, width, allowed)
        words = 1 + code.words(room, width) + room * unit_bytes // 4
        rungs.append(Rung(room, code, words))
    tile = _tile(top, unit_bytes, _LEAST_TILE)
    return Ladder(width, unit_bytes, tile, tuple(rungs), collectives.at_once())


def _tile(top: int, unit_bytes: int, most: int) -> int:
    """Entries that are packed at a time: tiles of one length, and no longer than needed."""
    numbers = max(1, unit_bytes // 4)
    tile = min(top, _multiple(max(1, min(most, _TILE_NUMBERS // numbers)), _LANES))
    tiles = -(-top // tile)
    return _multiple(-(-top // tiles), _LANES)


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def check_capacity(name: str, capacity: int | None) -> None:
    """Raises unless it is a number of entries, or None."""
    if capacity is not None:
        arguments.check_whole(name, capacity, 1, " or None")


def check_ratio(ratio: float) -> None:
    """Raises unless rungs of this ratio make a ladder."""
    why = (
        "It is the step from one message size to the next: a smaller one pads less in one "
        "round, and compiles longer."
    )
    arguments.check_between("ratio", ratio, 1.05, 64, why)
