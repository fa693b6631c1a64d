"""What every point of Zen's design space sends, by hand and by an oracle."""

import functools

import numpy as np
import pytest

from benchmarks.papers.formulas import design_space as ds, measures
from benchmarks.papers.formulas.design_space import BALANCED_PARALLELISM, Point
from sparsejax.errors import ArgumentError
from sparsejax.units.ownership import MurmurHash, StripedHash


def as_sets(units, size):
    """Lists of units, one a rank, as booleans."""
    sets = np.zeros((len(units), size), bool)
    for row, own in zip(sets, units, strict=True):
        row[list(own)] = True
    return sets


# --- Literal numbers, worked out by hand.

# Four ranks, and parts {0, 1}, {2, 3}, {4, 5}, {6, 7}; entries by part and rank:
#   part 0: 1 1 1 1,  part 1: 1 1 0 0,  part 2: 0 1 0 0,  part 3: 0 0 1 0
FOUR = as_sets([[0, 2], [0, 2, 4], [0, 6], [0]], 8)

FOUR_BY_HAND = {
    # (entries that the most loaded rank receives, entries of the busiest links)
    # Of 8 entries all but one's own; rank 1 sends its 3 to 3.
    ("point_to_point", "incremental", "centralization"): (7, 9),
    ("point_to_point", "one_shot", "centralization"): (7, 9),
    # In each stage somebody passes on the set of rank 1.
    ("ring", "one_shot", "centralization"): (7, 3 + 3 + 3),
    # From the left: 1, 2, 4 to rank 0; 2, 2, 3 to 1; 3, 3, 3 to 2; 2, 4, 4 to 3.
    ("ring", "incremental", "centralization"): (10, 3 + 4 + 4),
    # 3, 2, 1, 2 entries in the first stage; unions {0, 2, 4} and {0, 6} in the second.
    ("hierarchy", "incremental", "centralization"): (3 + 2, 3 + 3),
    ("hierarchy", "one_shot", "centralization"): (2 + 5, 3 + 5),
    # Rank 0 receives its part from 3 others; then each part is one entry.
    ("point_to_point", "incremental", "parallelism"): (3 + 3, 3 + 3),
    # All 8 entries go back; rank 0 sends its 4 to 3, the last two receive 1 + 7.
    ("point_to_point", "one_shot", "parallelism"): (1 + 7, 3 + 12),
    # Part 0 goes by 2, 3, 0; the others only take their last step. Ranks 2 and 3 get 2.
    ("ring", "incremental", "parallelism"): (2 + 3, 3 + 3),
    # Part 0 grows: 1 to rank 2, 2 to rank 3, 3 to rank 0. Rank 3 also gets part 3.
    ("ring", "one_shot", "parallelism"): (3 + 7, (1 + 2 + 3) + (4 + 4 + 4)),
    # Rank 0 gets parts 0 and 2 from rank 1, and part 0 from rank 2, for ranks 2 and 3.
    ("hierarchy", "incremental", "parallelism"): (2 + 1 + 3, (2 + 1) + (1 + 2)),
    # Rank 2: part 0 from 3, part 2 of ranks 0 and 1, then all but one of 8.
    ("hierarchy", "one_shot", "parallelism"): (1 + 1 + 7, (2 + 2) + (4 + 6)),
}


@pytest.mark.parametrize("choices", FOUR_BY_HAND, ids=" ".join)
def test_four_ranks_by_hand(choices):
    balance = "imbalanced" if choices[-1] == "parallelism" else None
    found = ds.traffic(Point(*choices, balance), FOUR)
    assert (found.most_received, found.link_bytes) == FOUR_BY_HAND[choices]


def test_two_ranks_by_hand():
    sets = as_sets([[0, 1, 2], [2, 3]], 8)
    # All is rank 0's: it gets 2 entries of rank 1, which gets back the union, or all 5.
    sparse_ps = Point("point_to_point", "incremental", "parallelism", "imbalanced")
    assert ds.traffic(sparse_ps, sets).times(8).most_received == 4 * 8
    assert ds.sparse_ps(sets).most_received == 4 * 8
    assert ds.sparse_ps(sets, index_bytes=0).most_received == 4 * 4
    assert ds.sparse_ps(sets, value_bytes=256).most_received == 4 * 260


def test_schemes_by_hand():
    assert ds.all_reduce(FOUR).most_received == 2 * 3 / 4 * 8 * 4
    assert ds.ag_sparse(FOUR).most_received == 7 * 8
    assert ds.sparcml(FOUR).most_received == 5 * 8
    assert ds.sparse_ps(FOUR).most_received == 6 * 8
    # Each part is one block of two values and an offset; the sets of blocks are as above.
    assert ds.omnireduce(FOUR, 2).most_received == 6 * (2 * 4 + 4)
    # Three blocks of three, the last filled up; owners of 0, 0, 1, 1 blocks, more or less.
    assert ds.omnireduce(FOUR, 3).link_bytes % (3 * 4 + 4) == 0
    # By scatter, 3/4 of an entry, then by all-gather 9/4: the 3 entries of other parts.
    assert ds.sparse_ps_broadcast(FOUR).most_received == (3 + 3) * 8
    hashed = ds.traffic(BALANCED_PARALLELISM, FOUR)
    assert ds.balanced_parallelism(FOUR).most_received == hashed.most_received * 8
    bare = ds.balanced_parallelism_without_index(FOUR)
    assert bare.most_received == hashed.most_received * 4


def test_zen_sends_a_bit_a_unit_of_other_parts():
    sets = np.random.default_rng(0).random((4, 1024)) < 0.1
    union = sets.any(axis=0).sum()
    pull = ds.zen(sets).received[1]
    # 1024 units in 4 equal parts: 3 bitmaps of 256 bits. All values but one's own.
    owners = measures.assignment(StripedHash(), 1024, 4)
    own = np.bincount(owners[sets.any(axis=0)], minlength=4)
    np.testing.assert_array_equal(pull, 4.0 * (union - own) + 3 * 256 / 8)


def test_a_heavy_part_holds_up_a_parameter_server():
    # All 100 entries are the first rank's: 3 sets come in, and the union leaves 3 times.
    sets = np.broadcast_to(np.arange(400) < 100, (4, 400))
    assert ds.sparse_ps(sets).link_bytes == (3 * 100 + 3 * 100) * 8
    # A broadcast has help: a scatter of 3/4 of it, and an all-gather of 3/4.
    assert ds.sparse_ps_broadcast(sets).link_bytes == (3 * 100 + 75 + 75) * 8


# --- An oracle: entries move from rank to rank, one message after the other.


def oracle(point, sets, owners):
    """Entries that each rank receives, by moving lists of entries about."""
    n = len(sets)
    received = np.zeros(n, int)
    merge = (lambda a, b: [*a, *b]) if point.aggregation == "one_shot" else _union
    own = [list(np.flatnonzero(row)) for row in sets]
    if point.partition == "centralization":
        if point.communication == "hierarchy":
            return _butterfly(own, merge, received)
        for root in range(n):
            for step in range(1, n):
                sender = (root + step) % n
                if point.communication == "ring" and point.aggregation == "incremental":
                    held = functools.reduce(
                        merge, [own[(root + k) % n] for k in range(1, step + 1)]
                    )
                    received[(sender + 1) % n] += len(held)
                else:
                    received[root] += len(own[sender])
        return received
    for part in range(n):
        held = [[u for u in units if owners[u] == part] for units in own]
        if point.communication == "ring":
            for rank in range(part + 1, part + n):
                received[(rank + 1) % n] += len(held[rank % n])
                held[(rank + 1) % n] = merge(held[rank % n], held[(rank + 1) % n])
        else:
            bits = range(n.bit_length() - 1)
            steps = [(1 << k, 2 << k) for k in bits]
            if point.communication == "point_to_point":
                steps = [(None, None)]
            for bit, above in steps:
                for rank in range(n):
                    place = rank ^ part
                    if bit is None and rank != part:
                        to = part
                    elif bit is not None and place % above == bit:
                        to = rank ^ bit
                    else:
                        continue
                    received[to] += len(held[rank])
                    held[to] = merge(held[to], held[rank])
        received += [len(held[part]) * (rank != part) for rank in range(n)]
    return received


def _union(a, b):
    return sorted({*a, *b})


def _butterfly(own, merge, received):
    held, bit = list(own), 1
    while bit < len(own):
        received += [len(held[rank ^ bit]) for rank in range(len(own))]
        held = [merge(held[rank], held[rank ^ bit]) for rank in range(len(own))]
        bit *= 2
    return received


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("point", ds.points(), ids=str)
def test_every_point_receives_what_messages_carry(point, n):
    for seed in range(2):
        rng = np.random.default_rng(seed)
        # Some units that all have, some ranks with more than others.
        sets = rng.random((n, 96)) < 0.4 * rng.random((n, 1)) * rng.random(96)
        sets |= rng.random(96) < 0.1
        owners = measures.equal_ranges(96, n)
        if point.balance == "balanced":
            owners = measures.assignment(MurmurHash(seed), 96, n)
        found = ds.traffic(point, sets, ownership=MurmurHash(seed))
        wanted = oracle(point, sets, owners)
        np.testing.assert_array_equal(found.received.sum(axis=0), wanted)
        # What one receives another sends.
        np.testing.assert_array_equal(found.sent.sum(axis=1), found.received.sum(axis=1))


def test_errors():
    with pytest.raises(ArgumentError, match=r"communication must be one of .*'tree'"):
        Point("tree", "one_shot", "centralization")
    with pytest.raises(ArgumentError, match="balance must be one of"):
        Point("ring", "one_shot", "parallelism")
    with pytest.raises(ArgumentError, match="ranks, got 3"):
        ds.traffic(BALANCED_PARALLELISM, np.ones((3, 8), bool))
    with pytest.raises(ArgumentError, match="block must be a positive int, got 0"):
        ds.omnireduce(FOUR, 0)
