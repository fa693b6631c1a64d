"""What points of Zen's design space send, by hand."""

import numpy as np
import pytest

from benchmarks.papers.formulas import design_space as ds, measures
from benchmarks.papers.formulas.design_space import BALANCED_PARALLELISM, Point
from sparsejax.units.ownership import StripedHash
from tests.bench.papers.test_measures import as_sets


# Four ranks, and parts {0, 1}, {2, 3}, {4, 5}, {6, 7}; entries by part and rank:
#   part 0: 1 1 1 1,  part 1: 1 1 0 0,  part 2: 0 1 0 0,  part 3: 0 0 1 0
FOUR = as_sets([0, 2], [0, 2, 4], [0, 6], [0])

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
    sets = as_sets([0, 1, 2], [2, 3])
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
