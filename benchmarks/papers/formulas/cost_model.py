"""Costs of a synchronization by the papers' formulas: messages and bytes of one rank.

Pure arithmetic, for any number of ranks and without devices. This file holds the model and
the formulas of Zen, which follow how sets grow as they are added up; `cost_tables` holds
those of EmbRace, DRAGONN, Ok-Topk and SparDL. The time of a `Cost` is

    rounds * alpha + bytes / bandwidth

with alpha seconds a message. Zen, whose M, d, g and s are named in `Workload`, leaves the
first term out; its schemes get the messages that one rank sends here, n - 1 where it sends
to all others. The formulas are idealized: no headers and no padding, the same density on
all ranks, and a set that goes as entries however dense it has become. An entry is a unit
and its index: where Zen writes 2M, for 32-bit units, it reads here

    E = units * (unit_bytes + index_bytes)
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sparsejax import arguments
from sparsejax.errors import ArgumentError


class Cost(NamedTuple):
    """Messages and bytes that the busiest rank sends, or receives where that is more.

    Attributes:
        rounds: Messages that follow one another.
        bytes: Bytes in all of them.
    """

    rounds: float
    bytes: float

    def time(self, alpha: float, bandwidth: float) -> float:
        """Seconds, with alpha seconds a message and so many bytes a second."""
        arguments.check_at_least("alpha", alpha, 0)
        arguments.check_positive("bandwidth", bandwidth)
        return self.rounds * alpha + self.bytes / bandwidth


def total(*stages: Cost) -> Cost:
    """The cost of stages that follow one another."""
    return Cost(math.fsum(s.rounds for s in stages), math.fsum(s.bytes for s in stages))


def check_power_of_two(name: str, value: int) -> None:
    """Raises unless an argument is 1, 2, 4, 8, ..."""
    if not arguments.is_int(value, 1) or value & (value - 1):
        raise ArgumentError(f"{name} must be a power of two, got {value!r}.")


def doublings(ranks: int) -> int:
    """log2 of the ranks, rounded up: rounds in which what a rank holds doubles."""
    return (ranks - 1).bit_length()


@dataclass(frozen=True)
class Workload:
    """One array that all ranks add up, as Zen describes it (definitions 4 and 5).

    Attributes:
        ranks: n.
        units: |G|, units of the array: single numbers, or rows of a table.
        unit_bytes: Bytes of a unit; M is units * unit_bytes.
        density: d, the share of units that are not zero on one rank.
        growth: g^k, the share of non-zero units in a sum over k ranks divided by that on
            one, for k = 2, 4, 8, ... below n and for n itself.
        skewness: s, entries of the fullest of n equal ranges over those of the mean one.
        index_bytes: Bytes of an index; 0 for the ideal scheme that sends none.
    """

    ranks: int
    units: int
    unit_bytes: float
    density: float
    growth: tuple[float, ...]
    skewness: float = 1.0
    index_bytes: float = 4.0

    def __post_init__(self):
        arguments.check_at_least("ranks", self.ranks, 1)
        arguments.check_at_least("units", self.units, 1)
        arguments.check_positive("unit_bytes", self.unit_bytes)
        arguments.check_share("density", self.density)
        arguments.check_at_least("index_bytes", self.index_bytes, 0)
        arguments.check_between("skewness", self.skewness, 1, self.ranks)
        points = _points(self.ranks)
        if len(self.growth) != len(points):
            raise ArgumentError(
                f"growth must hold a ratio for each of {points} ranks, got {self.growth!r}."
            )
        last = 1.0
        for k, ratio in zip(points, self.growth, strict=True):
            # What is computed or measured may be off in the last digits.
            most = min(k, 1 / self.density) * (1 + 1e-6)
            if not last * (1 - 1e-6) <= ratio <= most:
                raise ArgumentError(
                    "growth must not fall, nor exceed the number of ranks or 1 / density: "
                    f"at {k} ranks it must lie between {last:g} and {most:g}, "
                    f"got {self.growth!r}."
                )
            last = ratio

    @classmethod
    def same(
        cls,
        ranks: int,
        units: int,
        unit_bytes: float,
        density: float,
        *,
        skewness: float = 1.0,
        index_bytes: float = 4.0,
    ) -> "Workload":
        """All ranks have the same set: g^k = 1."""
        growth = tuple(1.0 for _ in _points(ranks))
        return cls(ranks, units, unit_bytes, density, growth, skewness, index_bytes)

    @classmethod
    def disjoint(
        cls,
        ranks: int,
        units: int,
        unit_bytes: float,
        density: float,
        *,
        skewness: float = 1.0,
        index_bytes: float = 4.0,
    ) -> "Workload":
        """No two ranks have a unit in common: g^k = k."""
        growth = tuple(float(k) for k in _points(ranks))
        return cls(ranks, units, unit_bytes, density, growth, skewness, index_bytes)

    @classmethod
    def independent(
        cls,
        ranks: int,
        units: int,
        unit_bytes: float,
        density: float,
        *,
        skewness: float = 1.0,
        index_bytes: float = 4.0,
    ) -> "Workload":
        """Each rank draws its set at random: g^k = (1 - (1 - d)^k) / d."""
        arguments.check_share("density", density)
        growth = tuple((1 - (1 - density) ** k) / density for k in _points(ranks))
        return cls(ranks, units, unit_bytes, density, growth, skewness, index_bytes)

    def gamma(self, k: float) -> float:
        """g^k; between known points a power of k, which is exact for disjoint sets."""
        arguments.check_between("k", k, 1, self.ranks)
        ks, ratios = (1, *_points(self.ranks)), (1.0, *self.growth)
        right = bisect.bisect_left(ks, k)
        if ks[right] == k:
            return ratios[right]
        left = right - 1
        share = math.log(k / ks[left]) / math.log(ks[right] / ks[left])
        return ratios[left] ** (1 - share) * ratios[right] ** share

    @property
    def dense_bytes(self) -> float:
        """M."""
        return self.units * self.unit_bytes

    @property
    def set_bytes(self) -> float:
        """E d, the entries of one rank: Zen's 2Md."""
        return self.units * (self.unit_bytes + self.index_bytes) * self.density

    @property
    def sum_bytes(self) -> float:
        """E d g^n, the entries of the sum."""
        return self.set_bytes * self.gamma(self.ranks)


def _points(ranks: int) -> tuple[int, ...]:
    """The numbers of ranks at which `Workload.growth` holds a ratio."""
    return tuple(min(2 << k, ranks) for k in range(doublings(ranks)))


def all_reduce(workload: Workload) -> Cost:
    """The dense all-reduce that Zen compares with: 2 (n - 1)/n M, in a ring's messages."""
    n = workload.ranks
    return Cost(2 * (n - 1), 2 * (n - 1) / n * workload.dense_bytes)


def ag_sparse(workload: Workload) -> Cost:
    """AGsparse, Zen 2.4 and Lemma 2: every rank gets the whole sets of all others.

    (n - 1) E d. Overlaps save nothing. Zen prints no formula; this is the traffic that it
    gives to one-shot aggregation with Centralization.
    """
    n = workload.ranks
    return Cost(n - 1, (n - 1) * workload.set_bytes)


def hierarchical_centralization(workload: Workload) -> Cost:
    """Zen, equation (2): E d (g^1 + g^2 + g^4 + ... + g^(n/2)).

    The paper takes n as a power of two. Of other n, the ranks beyond one send their sets
    to a partner first and are sent the sum in the end, as in our scheme. That adds
    E d (1 + g^n), and the fullest partial sums are over up to as many ranks more.
    """
    n = workload.ranks
    swaps = n.bit_length() - 1
    extra = n - (1 << swaps)
    sizes = [workload.gamma((1 << k) + min(extra, 1 << k)) for k in range(swaps)]
    if extra:
        sizes += [1.0, workload.gamma(n)]
    return Cost(len(sizes), workload.set_bytes * math.fsum(sizes))


def balanced_parallelism(workload: Workload) -> Cost:
    """Zen, equation (1): (n - 1)/n E d (g^n + 1), for parts of equal size."""
    n = workload.ranks
    share = (n - 1) / n
    return Cost(2 * (n - 1), share * (workload.set_bytes + workload.sum_bytes))


def balanced_parallelism_without_index(workload: Workload) -> Cost:
    """Zen 2.4's ideal scheme: equation (1) with M in place of E, values alone."""
    n = workload.ranks
    growth = 1 + workload.gamma(n)
    values = workload.dense_bytes * workload.density * growth
    return Cost(2 * (n - 1), (n - 1) / n * values)


def hash_bitmap(workload: Workload) -> Cost:
    """Zen, appendix B.3: |G|/8 bytes of hash bitmap reach a worker in one pull.

    The paper says |G|/32, in words of 32 bits, from n servers that are no workers.
    """
    return Cost(workload.ranks, workload.units / 8)


def balanced_parallelism_with_bitmap(workload: Workload) -> Cost:
    """Zen 3.3: equation (1) whose pull sends values and bitmaps, (n - 1)/n of B.3's.

    (n - 1)/n (E d + M d g^n + |G|/8). The paper prints no formula for the whole; a rank
    that is a worker and a server needs no message to itself.
    """
    n = workload.ranks
    values = workload.dense_bytes * workload.density * workload.gamma(n)
    bitmap = hash_bitmap(workload).bytes
    return Cost(2 * (n - 1), (n - 1) / n * (workload.set_bytes + values + bitmap))


def sparse_ps(workload: Workload) -> Cost:
    """Zen, appendix B.1: s (n - 1)/n E d (1 + g^n), at the server of the fullest range.

    The paper takes the skewness of the sums as that of one rank's set. Sums fill up and
    become more even, so this overstates the pull.
    """
    push, pull = _point_to_point(workload)
    return total(push, pull)


def sparse_ps_broadcast(workload: Workload, algorithm: str = "scatter_all_gather") -> Cost:
    """Zen, appendix B.1, sparse PS with broadcast: s (n - 1)/n E d + b E d g^n.

    The factor b is ceil(log2 n) for "binomial", a binomial tree, and 2 (n - 1)/n for
    "scatter_all_gather". The paper calls b a number of rounds, which the latter is not.
    With this b all the sum is broadcast from one place; servers that broadcast equal
    parts at once would need less. Here scatter and all-gather take n - 1 messages each.
    """
    n = workload.ranks
    ways = {
        "binomial": (doublings(n), doublings(n)),
        "scatter_all_gather": (2 * (n - 1), 2 * (n - 1) / n),
    }
    arguments.check_one_of("algorithm", algorithm, ways)
    rounds, factor = ways[algorithm]
    push, _ = _point_to_point(workload)
    return total(push, Cost(rounds, factor * workload.sum_bytes))


def _point_to_point(workload: Workload) -> tuple[Cost, Cost]:
    """Push and pull of a parameter server whose fullest range is s times the mean."""
    n = workload.ranks
    share = workload.skewness * (n - 1) / n
    push = Cost(n - 1, share * workload.set_bytes)
    return push, Cost(n - 1, share * workload.sum_bytes)


def ring_parallelism_push(workload: Workload) -> Cost:
    """Zen, appendix B.1, Ring, Incremental, Parallelism: the first step.

    E d/n (g^1 + g^2 + ... + g^(n-1)), in n - 1 stages with equal parts. Ratios that
    `growth` does not tell are those of `Workload.gamma`.
    """
    n = workload.ranks
    sizes = math.fsum(workload.gamma(k) for k in range(1, n))
    return Cost(n - 1, workload.set_bytes / n * sizes)


def hierarchy_parallelism_push(workload: Workload) -> Cost:
    """Zen, appendix B.1, Hierarchy, Incremental, Parallelism: the first step.

    E d (g^1/2 + g^2/4 + g^4/8 + ... + g^(n/2)/n), in log2 n stages: the paper's volume of
    all ranks divided by n. Only for a power of two.
    """
    check_power_of_two("ranks", workload.ranks)
    stages = range(doublings(workload.ranks))
    sizes = math.fsum(workload.gamma(1 << i) / (2 << i) for i in stages)
    return Cost(len(stages), workload.set_bytes * sizes)


def omni_reduce(
    workload: Workload,
    block: int,
    density: float,
    growth: tuple[float, ...],
    skewness: float = 1.0,
) -> Cost:
    """OmniReduce by Zen's sparse PS formula, with blocks as units and no indices.

    s (n - 1)/n M d (1 + g^n). Zen 2.4 prints no formula; it describes the scheme as a
    sparse PS that sends tensor blocks. The offsets that OmniReduce sends with its blocks
    are left out, as Zen does.

    Args:
        workload: The array; its own density, growth and skewness are not used.
        block: Units in a block; 256 in the paper.
        density: The share of blocks with a unit that is not zero.
        growth: The same as in `Workload`, of blocks.
        skewness: The same as in `Workload`, of blocks.
    """
    arguments.check_at_least("block", block, 1)
    n, count = workload.ranks, -(-workload.units // block)
    unit_bytes = block * workload.unit_bytes
    return sparse_ps(Workload(n, count, unit_bytes, density, growth, skewness, 0.0))


def zen_optimum(workload: Workload) -> str:
    """Zen, theorem 1: "balanced" or "hierarchical", or "dense" if neither sends less.

    Equations (1) and (2) and the all-reduce, compared by bytes as in the paper. If equal,
    the one with fewer messages: between two ranks with the same set, "hierarchical".
    """
    bytes_of = {
        "dense": all_reduce(workload).bytes,
        "hierarchical": hierarchical_centralization(workload).bytes,
        "balanced": balanced_parallelism(workload).bytes,
    }
    return min(bytes_of, key=lambda name: bytes_of[name])


#: The formulas that need nothing but a workload.
SCHEMES: dict[str, Callable[[Workload], Cost]] = {
    "all_reduce": all_reduce,
    "ag_sparse": ag_sparse,
    "hierarchical_centralization": hierarchical_centralization,
    "balanced_parallelism": balanced_parallelism,
    "balanced_parallelism_with_bitmap": balanced_parallelism_with_bitmap,
    "balanced_parallelism_without_index": balanced_parallelism_without_index,
    "sparse_ps": sparse_ps,
    "sparse_ps_broadcast": sparse_ps_broadcast,
}
