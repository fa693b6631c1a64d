"""Zen's design space: the bytes of every way to add up sparse gradients, from their sets.

Zen (2.2) orders the ways by four choices: how ranks communicate, when entries are added,
whether a gradient travels whole or in parts, and whether the parts are balanced. `points`
lists them all, and `traffic` counts, for given sets, the entries that each rank sends and
receives at each stage. Nothing is estimated from densities. There are n ranks, rank r has
the set I_r, and U is the union of all; an entry is a value and an index (COO).

*Centralization*: every rank is to get all entries.

    point-to-point  Every rank sends its set to all others. One stage, so it does not matter
                    when entries are added.
    ring, one-shot  n - 1 stages: each rank passes on what came from its left the stage
                    before, its own set first. So each set comes by once.
    ring, incremental  n chains, each ending at another rank. In stage t a rank gets from
                    its left the sum of the t ranks there, adds its own, and passes it on.
                    (If it is read as adding up only what is kept, and not what is passed
                    on, it sends the same as one-shot.)
    hierarchy       log2(n) stages: pairs, then pairs of pairs, and so on, exchange what
                    they have, and so each rank is the root of a tree. One-shot sends all
                    sets one behind the other, incremental sends their sum.

*Parallelism*: units belong to n parts, one a rank, equal ranges of consecutive units
("imbalanced") or hashed ("balanced"). The first step brings each part to its owner, the
second all parts to all ranks, and both use the same pattern.

    point-to-point  Every rank sends each owner its entries of that part; then owners send
                    their parts to all others. A stage each.
    ring            For each part a chain of n - 1 stages, from the owner's right all the
                    way round to the owner; then parts go round, one a stage.
    hierarchy       For each part a tree of log2(n) stages, so that a rank sends half of
                    the parts in the first stage, a quarter in the second, and so on; then
                    parts are collected in pairs, pairs of pairs, and so on.

Incremental: sums travel in both steps. One-shot: entries are added once they are all where
they are needed, so all of them travel, in both steps. (If owners add up before the second
step, point-to-point sends what incremental does, and the others no less than that.)
So for both of these questions the other reading adds no point that costs less.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.papers.formulas import measures
from sparsejax import arguments
from sparsejax.errors import ArgumentError
from sparsejax.units.ownership import Ownership, StripedHash


COMMUNICATION = ("ring", "hierarchy", "point_to_point")
AGGREGATION = ("incremental", "one_shot")
BALANCE = {"centralization": (None,), "parallelism": ("balanced", "imbalanced")}
HASH = StripedHash()


@dataclasses.dataclass(frozen=True)
class Point:
    """One way to add up sparse gradients, by its four choices.

    Attributes:
        communication: "ring", "hierarchy" or "point_to_point".
        aggregation: "incremental", or "one_shot".
        partition: "centralization" or "parallelism".
        balance: "balanced" or "imbalanced"; None for centralization, which has no parts.
    """

    communication: str
    aggregation: str
    partition: str
    balance: str | None = None

    def __post_init__(self):
        arguments.check_one_of("communication", self.communication, COMMUNICATION)
        arguments.check_one_of("aggregation", self.aggregation, AGGREGATION)
        arguments.check_one_of("partition", self.partition, BALANCE)
        arguments.check_one_of("balance", self.balance, BALANCE[self.partition])


BALANCED_PARALLELISM = Point("point_to_point", "incremental", "parallelism", "balanced")
HIERARCHICAL_CENTRALIZATION = Point("hierarchy", "incremental", "centralization")


def points() -> list[Point]:
    """All points of the design space: six of centralization, twelve of parallelism."""
    return [
        Point(communication, aggregation, partition, balance)
        for communication, aggregation in itertools.product(COMMUNICATION, AGGREGATION)
        for partition, values in BALANCE.items()
        for balance in values
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class StageBytes:
    """Bytes, or entries, of each rank at each stage, as floats [stages, ranks].

    Attributes:
        received: Bytes that a rank receives.
        sent: Bytes that it sends.
    """

    received: np.ndarray
    sent: np.ndarray

    @property
    def most_received(self) -> float:
        """The bytes that the most loaded rank receives over all stages."""
        return float(self.received.sum(axis=0).max())

    @property
    def link_bytes(self) -> float:
        """The bytes that time is made of, where a stage waits for the one before.

        Links carry both directions at once, so a stage lasts as long as the busiest rank
        sends or receives. Over a bandwidth, this is the time, latency left out: the paper
        counts so where a heavy part is sent back to all (B.1).
        """
        return float(np.maximum(self.received, self.sent).max(axis=1, initial=0).sum())

    def then(self, after: "StageBytes") -> "StageBytes":
        """These stages, and other ones after them."""
        received = np.concatenate([self.received, after.received])
        return StageBytes(received, np.concatenate([self.sent, after.sent]))

    def times(self, unit_bytes: float) -> "StageBytes":
        """The bytes of entries of `unit_bytes` each."""
        return StageBytes(self.received * unit_bytes, self.sent * unit_bytes)


def traffic(point: Point, sets: ArrayLike, *, ownership: Ownership = HASH) -> StageBytes:
    """The *entries* that each rank receives and sends at each stage.

    Args:
        point: A way to add up; the module's description says what it sends.
        sets: Booleans [ranks, units], the non-zeros of each rank; ranks a power of two.
        ownership: The rule that gives units to "balanced" parts.
    """
    sets = measures.checked(sets)
    ranks, size = sets.shape
    if ranks < 2 or ranks & (ranks - 1):
        raise ArgumentError(f"sets must be those of 2, 4, 8, ... ranks, got {ranks}.")
    once = point.aggregation == "one_shot"
    if point.partition == "centralization":
        gather = {"ring": _ring_all, "hierarchy": _doubling, "point_to_point": _send_all}
        return gather[point.communication](sets, once)
    if point.balance == "balanced":
        owners = measures.assignment(ownership, size, ranks)
    else:
        owners = measures.equal_ranges(size, ranks)
    push = {"ring": _ring_push, "hierarchy": _halving, "point_to_point": _push}
    pull = {"ring": _ring_pull, "hierarchy": _doubled_pull, "point_to_point": _pull}
    pushed = push[point.communication](sets, owners, once)
    pulled_sets = sets if once else sets.any(axis=0, keepdims=True)
    amounts = measures.part_counts(pulled_sets, owners, ranks).sum(axis=0)
    return pushed.then(pull[point.communication](amounts))


# --- Centralization.


def _send_all(sets: np.ndarray, _: bool = True) -> StageBytes:
    counts = sets.sum(axis=1)
    return _stage(counts.sum() - counts, (len(sets) - 1) * counts)


def _ring_all(sets: np.ndarray, once: bool) -> StageBytes:
    ranks, size = sets.shape
    if once:
        return _ring_pull(sets.sum(axis=1))
    received = np.zeros((ranks, ranks))
    # Where a unit was last seen on the way round: twice, to know it from the start.
    last = np.full(size, -ranks)
    for step in range(2 * ranks):
        rank = step % ranks
        if step >= ranks:
            back = np.minimum(step - last, ranks)
            received[:, rank] = np.cumsum(np.bincount(back, minlength=ranks + 1)[1:])
        last[sets[rank]] = step
    received = received[: ranks - 1]
    return StageBytes(received, np.roll(received, -1, axis=1))


def _doubling(sets: np.ndarray, once: bool) -> StageBytes:
    if once:
        return _doubled_pull(sets.sum(axis=1))
    rank = np.arange(len(sets))
    sizes = [(group, unions.sum(axis=1)) for group, unions in _groups(sets)]
    stages = [(size[rank // group ^ 1], size[rank // group]) for group, size in sizes]
    return _stages(stages, len(sets))


# --- Parallelism, the first step: each part to its owner.


def _push(sets: np.ndarray, owners: np.ndarray, _: bool = True) -> StageBytes:
    counts = measures.part_counts(sets, owners, len(sets))
    kept = np.diagonal(counts)
    return _stage(counts.sum(axis=0) - kept, counts.sum(axis=1) - kept)


def _ring_push(sets: np.ndarray, owners: np.ndarray, once: bool) -> StageBytes:
    ranks = len(sets)
    received = np.zeros((ranks - 1, ranks))
    stage = np.arange(1, ranks)
    counts = measures.part_counts(sets, owners, ranks)
    order = np.argsort(owners, kind="stable")
    edges = np.searchsorted(owners[order], np.arange(ranks + 1))
    by_unit = np.ascontiguousarray(sets.T)[order]
    for part in range(ranks):
        if once:
            added = counts[(part + stage) % ranks, part]
        else:
            # The first rank of the chain that has a unit; the owner comes last.
            chain = np.roll(by_unit[edges[part] : edges[part + 1]], -part - 1, axis=1)
            chain = chain[:, : ranks - 1]
            first_rank = chain.argmax(axis=1)[chain.any(axis=1)]
            added = np.bincount(first_rank, minlength=ranks - 1)
        received[stage - 1, (part + 1 + stage) % ranks] = np.cumsum(added)
    return StageBytes(received, np.roll(received, -1, axis=1))


def _halving(sets: np.ndarray, owners: np.ndarray, once: bool) -> StageBytes:
    ranks = len(sets)
    rank, stages = np.arange(ranks), []
    counts = measures.part_counts(sets, owners, ranks)
    for group, unions in _groups(sets):
        if once:
            amounts = counts.reshape(-1, group, ranks).sum(axis=1)
        else:
            amounts = measures.part_counts(unions, owners, ranks)
        # The parts whose owners agree in the bits below 2 * group travel together.
        width = 2 * group
        amounts = amounts.reshape(ranks // group, -1, width).sum(axis=1)
        received = amounts[rank // group ^ 1, rank % width]
        stages.append((received, received[rank ^ group]))
    return _stages(stages, ranks)


# --- Parallelism, the second step: all parts, of these many entries, to all ranks.


def _pull(amounts: np.ndarray) -> StageBytes:
    return _stage(amounts.sum() - amounts, (len(amounts) - 1) * amounts)


def _ring_pull(amounts: np.ndarray) -> StageBytes:
    rank, stage = np.arange(len(amounts)), np.arange(1, len(amounts))[:, None]
    received = amounts[(rank - stage) % len(amounts)].astype(float)
    return StageBytes(received, np.roll(received, -1, axis=1))


def _doubled_pull(amounts: np.ndarray) -> StageBytes:
    rank, stages = np.arange(len(amounts)), []
    for k in range(len(amounts).bit_length() - 1):
        of_group = amounts.reshape(-1, 1 << k).sum(axis=1)
        stages.append((of_group[(rank >> k) ^ 1], of_group[rank >> k]))
    return _stages(stages, len(amounts))


def _groups(sets: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The unions of groups of 1, 2, 4, ... consecutive ranks, up to half of all."""
    group = 1
    while len(sets) > 1:
        yield group, sets
        sets, group = sets[0::2] | sets[1::2], 2 * group


def _stage(received: np.ndarray, sent: np.ndarray) -> StageBytes:
    return StageBytes(received[None].astype(float), sent[None].astype(float))


def _stages(stages: list[tuple[np.ndarray, np.ndarray]], ranks: int) -> StageBytes:
    both = np.array(stages, float).reshape(-1, 2, ranks)
    return StageBytes(both[:, 0], both[:, 1])


# --- Schemes by name. Each takes sets [ranks, units] and gives bytes.


def all_reduce(sets: ArrayLike, value_bytes: float = 4) -> StageBytes:
    """The dense way: reduce-scatter and all-gather, 2 (n - 1) / n of all values."""
    sets = measures.checked(sets)
    ranks, size = sets.shape
    each = np.full((2, ranks), (ranks - 1) / ranks * size * value_bytes)
    return StageBytes(each, each)


def ag_sparse(
    sets: ArrayLike, value_bytes: float = 4, index_bytes: float = 4
) -> StageBytes:
    """AGsparse: every rank sends its set to all others."""
    return _send_all(measures.checked(sets)).times(value_bytes + index_bytes)


def sparcml(sets: ArrayLike, value_bytes: float = 4, index_bytes: float = 4) -> StageBytes:
    """SparCML with recursive doubling: Hierarchical Centralization."""
    return traffic(HIERARCHICAL_CENTRALIZATION, sets).times(value_bytes + index_bytes)


def omnireduce(
    sets: ArrayLike, block: int = 256, value_bytes: float = 4, offset_bytes: float = 4
) -> StageBytes:
    """OmniReduce: blocks with a non-zero in them go to the owners of equal ranges and back.

    Args:
        sets: Booleans [ranks, units].
        block: Units in a block, of which all are sent; the last is filled up with zeros.
        value_bytes: Of one unit.
        offset_bytes: Of the offset that travels with a block.
    """
    sets = measures.checked(sets)
    arguments.check_whole("block", block, 1)
    ranks, size = sets.shape
    padding = np.zeros((ranks, -size % block), bool)
    padded = np.concatenate([sets, padding], axis=1)
    blocks = np.asarray(padded.reshape(ranks, -1, block).any(axis=2))
    owners = measures.equal_ranges(blocks.shape[1], ranks)
    return _push_pull(blocks, owners).times(block * value_bytes + offset_bytes)


def sparse_ps(
    sets: ArrayLike, value_bytes: float = 4, index_bytes: float = 4
) -> StageBytes:
    """A parameter server: equal ranges, point to point, entries in COO (B.1)."""
    sets = measures.checked(sets)
    owners = measures.equal_ranges(sets.shape[1], len(sets))
    return _push_pull(sets, owners).times(value_bytes + index_bytes)


def sparse_ps_broadcast(
    sets: ArrayLike, value_bytes: float = 4, index_bytes: float = 4
) -> StageBytes:
    """A parameter server whose owners broadcast by scatter and all-gather (B.1).

    A part is cut into n pieces, each goes to another rank, and ranks collect them. So
    owners of long parts have help to send them.
    """
    sets = measures.checked(sets)
    ranks = len(sets)
    owners = measures.equal_ranges(sets.shape[1], ranks)
    parts = _union_parts(sets, owners)
    rest, away = parts.sum() - parts, (ranks - 1) / ranks
    scatter = _stage(rest / ranks, away * parts)
    collect = _stage(away * rest, ((ranks - 2) * parts.sum() + parts) / ranks)
    pushed = _push(sets, owners).then(scatter).then(collect)
    return pushed.times(value_bytes + index_bytes)


def balanced_parallelism(
    sets: ArrayLike, value_bytes: float = 4, index_bytes: float = 4
) -> StageBytes:
    """Balanced Parallelism with COO both ways."""
    return traffic(BALANCED_PARALLELISM, sets).times(value_bytes + index_bytes)


def balanced_parallelism_without_index(
    sets: ArrayLike, value_bytes: float = 4
) -> StageBytes:
    """Balanced Parallelism that need not tell which units there are: a bound."""
    return balanced_parallelism(sets, value_bytes, index_bytes=0)


def zen(sets: ArrayLike, value_bytes: float = 4, index_bytes: float = 4) -> StageBytes:
    """Zen: Balanced Parallelism, COO on the way in, hash bitmaps on the way out (3.3).

    A hash bitmap has a bit for each unit of a part, so all together have one a unit.
    """
    sets = measures.checked(sets)
    ranks, size = sets.shape
    owners = measures.assignment(HASH, size, ranks)
    bitmaps = np.bincount(owners, minlength=ranks) / 8
    pushed = _push(sets, owners).times(value_bytes + index_bytes)
    return pushed.then(_pull(_union_parts(sets, owners) * value_bytes + bitmaps))


def _union_parts(sets: np.ndarray, owners: np.ndarray) -> np.ndarray:
    return measures.part_counts(sets.any(axis=0, keepdims=True), owners, len(sets))[0]


def _push_pull(sets: np.ndarray, owners: np.ndarray) -> StageBytes:
    """Point to point, the parts added up by their owners."""
    return _push(sets, owners).then(_pull(_union_parts(sets, owners)))
