"""What a scheme would send, computed before anything runs.

A `Load` says what there is to add up: how many units, how wide, and how many of them one
rank has and sums over 2, 4, 8, ... ranks have. From it each scheme forecasts the bytes that
one rank sends, in the message sizes and index codes that it would take, so that a forecast
from true counts equals what `wire` counts in a run on CPUs. Messages on GPUs have other
sizes (`wire.ladder`), which are not forecast. What is forecast is the network: bytes, and
how many messages wait for one another. The work of packing is not in it.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp

from sparsejax import arguments
from sparsejax.errors import ArgumentError
from sparsejax.wire import collectives


@dataclasses.dataclass(frozen=True)
class Network:
    """The bandwidth and latency between ranks, and what starting an exchange costs them.

    A message of b bytes is taken to need the time

        latency_us / 1e6 + 8 b / (1e9 gbit_per_s)    seconds

    and a sparse exchange `exchange_us` more, however little it sends.

    Attributes:
        gbit_per_s: The bandwidth of a rank's link in one direction, in Gbit/s.
        latency_us: The time of an empty message, in microseconds.
        exchange_us: The time that a sparse exchange takes on the device whatever its size,
            in microseconds: its launches, and what it waits for. About 300 on a GPU.

    Example:
        >>> network = sparsejax.Network(gbit_per_s=25, latency_us=20)
        >>> print(sparsejax.explain(tx, params, ranks=16, network=network))
    """

    gbit_per_s: float
    latency_us: float
    exchange_us: float = 0.0

    def __post_init__(self):
        arguments.check_positive("gbit_per_s", self.gbit_per_s)
        arguments.check_at_least("latency_us", self.latency_us, 0)
        arguments.check_at_least("exchange_us", self.exchange_us, 0)


class Forecast(NamedTuple):
    """Bytes and messages that one rank would send.

    Attributes:
        push: Bytes on the way to where values are added up.
        pull: Bytes on the way back.
        messages: How many messages wait for one another, those that agree on a size
            included: the latencies.
        capacity: Entries in the longest message, or 0 where all goes densely.
        dense: Whether all goes densely.
        rounds: How many collectives with entries, or with the dense array, follow one
            another: what `sparsejax.metrics` counts. A round of an all-to-all or a gather
            is `ranks - 1` messages.
        coded: Whether values travel in the code that a sparsifier rounded them to.
    """

    push: float
    pull: float
    messages: int
    capacity: int = 0
    dense: bool = False
    rounds: int = 0
    coded: bool = False

    @property
    def bytes(self) -> float:
        """All bytes."""
        return self.push + self.pull

    def seconds(self, network: Network) -> float:
        """Seconds of a sum: those that no bandwidth shortens, and those of the bytes."""
        return self.fixed_seconds(network) + self.bytes * 8e-9 / network.gbit_per_s

    def fixed_seconds(self, network: Network) -> float:
        """Seconds that no bandwidth shortens: latencies, and what starting takes."""
        start = 0.0 if self.dense else network.exchange_us
        return 1e-6 * (self.messages * network.latency_us + start)


@dataclasses.dataclass(frozen=True)
class Load:
    """An array to sum: its size, and how many of its units are non-zero.

    Attributes:
        ranks: How many ranks.
        units: How many units: numbers, or rows.
        numbers: Numbers in a unit.
        dtype: Of the numbers.
        counts: Non-zero units of one rank, and of sums over 2, 4, ... and all ranks: the
            fullest of each.
        skewness: The fullest of as many equal ranges as ranks over the mean range (Zen,
            definition 5), of one rank.
        sum_skewness: The same, of the sum.
        shape: The shape of each leaf, where leaves are sent whole, and units are elements.
        room: How many entries one rank's array has room for, where it is given by entries
            or by rows; None where it is dense.
        fullest: The counts that ranks agree on, where they are known; else they follow from
            counts and skewness. With owners: units of the fullest part of any rank, and of
            the sum, and then what a pull of `baselines.pulls` agrees on; by recursive
            doubling: of the fullest partial sum before each message. Of `OmniReduce` units
            are blocks.
        listed: Whether they are the rows of a table that ranks list, with room for the ids
            of a rank, repeats included; see `Scheme.rows`.
        values: The code of the values, where a sparsifier rounded them to one.
        arrays: How many arrays they are of, each with a table for its code.
    """

    ranks: int
    units: int
    numbers: int
    dtype: str
    counts: tuple[float, ...]
    skewness: float = 1.0
    sum_skewness: float = 1.0
    shape: tuple[int, ...] = ()
    room: int | None = None
    fullest: tuple[int, ...] | None = None
    listed: bool = False
    values: str | None = None
    arrays: int = 1

    def __post_init__(self):
        if len(self.counts) != len(merged(self.ranks)):
            raise ArgumentError(
                f"counts must have {len(merged(self.ranks))} numbers, for sums over "
                f"{merged(self.ranks)} ranks, got {len(self.counts)}."
            )
        if any(not 0 <= count <= self.units for count in self.counts):
            raise ArgumentError(
                f"counts must lie in [0, {self.units}], got {list(self.counts)}."
            )

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return self.units * self.numbers

    def count(self, ranks: float) -> float:
        """Non-zero units of a sum over `ranks` ranks, by a power law between known ones."""
        sums = merged(self.ranks)
        for i in range(1, len(sums)):
            if ranks <= sums[i] or i == len(sums) - 1:
                low, high = self.counts[i - 1], self.counts[i]
                if low <= 0 or high <= 0:
                    return max(low, high)
                part = math.log(ranks / sums[i - 1]) / math.log(sums[i] / sums[i - 1])
                return low * (high / low) ** min(part, 1.0)
        return self.counts[0]

    def fullest_part(self, which: int, width: int, balanced: bool, sets: int = 1) -> int:
        """Units of the fullest part, of any rank or of the sum.

        Args:
            which: 0 for ranks, 1 for the sum.
            width: Slots in a part.
            balanced: Whether a hash spreads units over parts.
            sets: How many sets of units there are.
        """
        if self.fullest is not None:
            return self.fullest[which]
        count = self.counts[-which]
        if balanced:
            return fullest_part(count, self.ranks, width, sets)
        skewness = self.sum_skewness if which else self.skewness
        return min(math.ceil(min(skewness * count / self.ranks, count)), width)

    def all_reduce(self, wire_dtype=None) -> Forecast:
        """The dense sum, by halving and doubling: few messages and the fewest bytes."""
        sent = collectives.all_reduce_cost(
            self.size, jnp.dtype(self.dtype), wire_dtype, self.ranks
        )
        half, waits = sent / 2, 2 * agreeing(self.ranks)
        return Forecast(half, half, waits, dense=True, rounds=2)

    def unit_bytes(self, wire_dtype=None) -> int:
        """Bytes of a unit's value as it travels."""
        narrow = collectives.travelling(jnp.dtype(self.dtype), wire_dtype)
        return self.numbers * narrow.itemsize

    def part(self, inner: int) -> "Load":
        """The load that one of `inner` ranks of a host sums with other hosts."""
        outer, units = self.ranks // inner, -(-self.units // inner)
        counts = tuple(self.count(k * inner) / inner for k in merged(outer))
        room = None
        if self.listed:
            room = owned_of(room_of(self.room or 0, inner, units), inner, units)
        part = outer, units, self.numbers, self.dtype, counts
        return Load(*part, room=room, listed=self.listed)


def merged(ranks: int) -> tuple[int, ...]:
    """Over how many ranks the sums of a recursive doubling are, from 1 on."""
    powers = [1 << k for k in range(ranks.bit_length()) if 1 << k < ranks]
    return (*powers, ranks)


def agreeing(ranks: int) -> int:
    """Messages that wait for one another until all ranks agree on a number."""
    return (ranks - 1).bit_length()


def independent(ranks: int, units: int, density: float) -> tuple[float, ...]:
    """Counts where each rank draws its units alone."""
    return tuple(units * -math.expm1(k * math.log1p(-density)) if density < 1 else units
                 for k in merged(ranks))  # fmt: skip


def above_mean(parts: int) -> float:
    """How far the fullest of `parts` hashed parts is above the mean, in square roots of it.

    The largest of that many normal numbers, on average.
    """
    root = math.sqrt(2 * math.log(max(parts, 2)))
    return root - (math.log(math.log(max(parts, 3))) + math.log(4 * math.pi)) / (2 * root)


def fullest_part(count: float, parts: int, width: int, sets: int = 1) -> int:
    """Entries of the fullest part of a set that a hash spreads, or of any of several sets.

    Args:
        count: Entries of a set.
        parts: How many parts it has.
        width: Slots in a part.
        sets: How many sets of that many entries there are.
    """
    mean = count / parts
    most = mean + above_mean(parts * sets) * math.sqrt(mean)
    return min(math.ceil(min(most, count)), width)


def room_of(capacity: int, ranks: int, width: int) -> int:
    """Rows in a message to one owner of a list: the mean, and six standard deviations."""
    mean = capacity / ranks
    room = math.ceil(mean + 6 * math.sqrt(mean) + 8)
    return min(room, capacity, width)


def owned_of(room: int, ranks: int, width: int) -> int:
    """Rows that an owner has room for: all that fit into its messages."""
    return min(ranks * room, width)
