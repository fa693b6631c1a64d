"""Forecasts of what a scheme would send, computed before anything runs.

A `Load` describes an array to sum: the number and the width of its units, and how many of
them are non-zero on one rank and in sums over 2, 4, 8, ... ranks. From it each scheme
forecasts the bytes that one rank sends, in the message sizes and index codes that it would
use, so that a forecast from true counts equals the bytes that `wire` counts in a run.
Message sizes and the choice of a dense sum differ by platform: a forecast is for that of
CPUs, or inside `for_platform` for another. A forecast has the bytes and the number of
messages that wait for one another, but not the time of packing and unpacking.
"""

import dataclasses
import math
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from sparsejax import arguments
from sparsejax.errors import ArgumentError
from sparsejax.wire import collectives


def for_platform(platform: str) -> AbstractContextManager[Any]:
    """Returns a context in which forecasts are made for a platform.

    Args:
        platform: "cpu", "gpu", "tpu", or another that JAX names.
    """
    device = AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
    # JAX does not enter a mesh of another size than that of `jax.set_mesh`, 0 without one.
    size = jax.sharding.get_abstract_mesh().size or 1
    mesh = AbstractMesh((size,), ("device",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


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
        messages: The number of messages that wait for one another, which is the number of
            latencies; messages to agree on a size are included.
        capacity: The entries of the longest message, or 0 for a dense sum.
        dense: Whether the sum is dense.
        rounds: The number of collectives with entries, or with the dense array, that follow
            one another, as `sparsejax.metrics` counts them. A round of an all-to-all or a
            gather is `ranks - 1` messages.
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
        """Returns the seconds of a sum: `fixed_seconds`, and the time of the bytes."""
        return self.fixed_seconds(network) + self.bytes * 8e-9 / network.gbit_per_s

    def fixed_seconds(self, network: Network) -> float:
        """Returns the seconds that do not depend on bandwidth: latencies and the start."""
        start = 0.0 if self.dense else network.exchange_us
        return 1e-6 * (self.messages * network.latency_us + start)


@dataclasses.dataclass(frozen=True)
class Load:
    """An array to sum: its size, and how many of its units are non-zero.

    Attributes:
        ranks: The number of ranks.
        units: The number of units, which are numbers or rows.
        numbers: The number of numbers in a unit.
        dtype: The dtype of the numbers.
        counts: The non-zero units of one rank, and of sums over 2, 4, ... and all ranks;
            for each the largest of all ranks.
        skewness: For one rank, with as many equal ranges as ranks, the entries of the
            fullest range over those of the mean range (Zen, definition 5).
        sum_skewness: The skewness of the sum.
        shape: The shape of each leaf, where leaves are sent whole, and units are elements.
        room: The capacity of one rank's array, where it is given as entries or rows; None
            where it is dense.
        fullest: The counts on which ranks agree, if they are known; otherwise they follow
            from `counts` and skewness. With owners: the units of the fullest part of any
            rank, those of the sum, and then what a pull of `baselines.pulls` agrees on.
            With recursive doubling: the units of the fullest partial sum before each
            message. For `OmniReduce` units are blocks.
        listed: Whether the units are the rows of a table that ranks list. Then `room` is
            the number of ids of a rank, repeats included; see `Scheme.rows`.
        values: The name of the value code, if a sparsifier rounded values to one.
        arrays: The number of arrays, each of which has a table for the value code.
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
        """The number of numbers of the array."""
        return self.units * self.numbers

    def count(self, ranks: float) -> float:
        """Returns the units of a sum over `ranks` ranks, by a power law between counts."""
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
        """Returns the units of the fullest part, of any rank or of the sum.

        Args:
            which: 0 for the ranks, 1 for the sum.
            width: The number of slots of a part.
            balanced: Whether a hash distributes units over parts.
            sets: The number of sets of units, of which the fullest part is taken.
        """
        if self.fullest is not None:
            return self.fullest[which]
        count = self.counts[-which]
        if balanced:
            return expected_fullest(count, self.ranks, width, sets)
        skewness = self.sum_skewness if which else self.skewness
        return min(math.ceil(min(skewness * count / self.ranks, count)), width)

    def all_reduce(self, wire_dtype=None) -> Forecast:
        """Forecasts the dense sum, by halving and doubling: few messages, fewest bytes."""
        sent = collectives.all_reduce_cost(
            self.size, jnp.dtype(self.dtype), wire_dtype, self.ranks
        )
        half, waits = sent / 2, 2 * agreeing(self.ranks)
        return Forecast(half, half, waits, dense=True, rounds=2)

    def unit_bytes(self, wire_dtype=None) -> int:
        """Returns the bytes of a unit's value on the wire."""
        narrow = collectives.travelling(jnp.dtype(self.dtype), wire_dtype)
        return self.numbers * narrow.itemsize

    def part(self, inner: int) -> "Load":
        """Returns the load that one of `inner` ranks of a host sums with other hosts."""
        outer, units = self.ranks // inner, -(-self.units // inner)
        counts = tuple(self.count(k * inner) / inner for k in merged(outer))
        room = None
        if self.listed:
            room = owned_of(room_of(self.room or 0, inner, units), inner, units)
        part = outer, units, self.numbers, self.dtype, counts
        return Load(*part, room=room, listed=self.listed)


def merged(ranks: int) -> tuple[int, ...]:
    """Returns the numbers of ranks of the partial sums of a recursive doubling, from 1."""
    powers = [1 << k for k in range(ranks.bit_length()) if 1 << k < ranks]
    return (*powers, ranks)


def agreeing(ranks: int) -> int:
    """Returns the number of successive messages of an agreement on a number (a pmax)."""
    return (ranks - 1).bit_length()


def independent(ranks: int, units: int, density: float) -> tuple[float, ...]:
    """Returns the counts of a load if each rank draws its units independently."""
    return tuple(units * -math.expm1(k * math.log1p(-density)) if density < 1 else units
                 for k in merged(ranks))  # fmt: skip


def above_mean(parts: int) -> float:
    """Returns the expected maximum of `parts` independent standard normal numbers.

    The fullest of `parts` hashed parts is above the mean by this many square roots of the
    mean.
    """
    root = math.sqrt(2 * math.log(max(parts, 2)))
    return root - (math.log(math.log(max(parts, 3))) + math.log(4 * math.pi)) / (2 * root)


def expected_fullest(count: float, parts: int, width: int, sets: int = 1) -> int:
    """Returns the expected entries of the fullest part of one or more hashed sets.

    Args:
        count: The entries of a set.
        parts: The number of parts of a set.
        width: The number of slots of a part.
        sets: The number of sets of that many entries.
    """
    mean = count / parts
    most = mean + above_mean(parts * sets) * math.sqrt(mean)
    return min(math.ceil(min(most, count)), width)


def room_of(capacity: int, ranks: int, width: int) -> int:
    """Returns the capacity of a message to one owner: the mean plus six sigma, in rows."""
    mean = capacity / ranks
    room = math.ceil(mean + 6 * math.sqrt(mean) + 8)
    return min(room, capacity, width)


def owned_of(room: int, ranks: int, width: int) -> int:
    """Returns the capacity of an owner in rows: that of all messages to it."""
    return min(ranks * room, width)
