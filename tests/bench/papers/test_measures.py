"""The measures of sets of non-zeros, with literal numbers and by what they must obey."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.papers.formulas import measures


def as_sets(*units, size=8):
    sets = np.zeros((len(units), size), bool)
    for row, own in zip(sets, units, strict=True):
        row[list(own)] = True
    return sets


def drawn(ranks, size, density, seed=0):
    return np.random.default_rng(seed).random((ranks, size)) < density


NOTHING = np.zeros((4, 8), bool)


# --- Sets of gradients.


def test_a_row_is_a_unit_if_any_number_is_not_zero():
    rows = [[[0, 0], [1, -1], [0, 0], [np.nan, 0]], [[0, -0.0], [0, 0], [1e-40, 0], [3, 4]]]
    wanted = [[False, True, False, True], [False, False, True, True]]
    for gradients in (np.array(rows, np.float32), jnp.array(rows, jnp.float32)):
        np.testing.assert_array_equal(measures.nonzero_sets(gradients), wanted)
    blocks = np.zeros((2, 3, 4, 5), np.int32)
    blocks[1, 2, 3, 4] = 7
    assert measures.nonzero_sets(blocks).sum() == 1


# --- Definitions 3 to 5.


def test_overlap_ratio():
    a, b, c = as_sets([0, 1, 2], [2, 3, 4, 5], [7])
    assert measures.overlap_ratio(a, b) == 1 / 3  # of the smaller
    assert measures.overlap_ratio(b, a) == 1 / 3
    assert measures.overlap_ratio(a, c) == 0
    assert measures.overlap_ratio(a, a) == 1
    assert measures.overlap_ratio(NOTHING[0], NOTHING[0]) == 0


def test_overlap_ratios_of_all_pairs_and_of_some():
    sets = drawn(9, 200, 0.3)
    every = measures.overlap_ratios(sets)
    pairs = [(i, j) for i in range(9) for j in range(i + 1, 9)]
    wanted = [measures.overlap_ratio(sets[i], sets[j]) for i, j in pairs]
    np.testing.assert_array_equal(every, wanted)
    some = measures.overlap_ratios(sets, pairs=10, seed=1)
    assert len(some) == 10
    assert set(some) <= set(every)
    np.testing.assert_array_equal(some, measures.overlap_ratios(sets, pairs=10, seed=1))
    assert len(measures.overlap_ratios(sets, pairs=100)) == 36


def test_densification():
    # Sizes 2, 2, 1, 3, so 2 on average; unions of pairs 3 and 4, of all 5.
    sets = as_sets([0, 1], [1, 2], [6], [5, 6, 2])
    sets[3, 0] = False
    union = [(3 + 3) / 2, 5]
    assert measures.densification(sets).tolist() == [union[0] / 2, union[1] / 2]
    assert measures.densification(sets, [1]).tolist() == [1]
    # Three ranks: the fourth is left out, and so is its size.
    assert measures.densification(sets, [3]).tolist() == [4 / (5 / 3)]
    assert measures.densification(NOTHING).tolist() == [1, 1]


def test_partition_shares_and_skewness():
    units = as_sets([0, 1, 2, 5])[0]
    assert measures.partition_shares(units, 4).tolist() == [0.5, 0.25, 0.25, 0]
    # The densest range is full, all of them are half full.
    assert measures.skewness_ratio(units, 4) == 1 / 0.5
    assert measures.skewness_ratio(units, 1) == 1
    assert measures.partition_shares(NOTHING[0], 4).tolist() == [0, 0, 0, 0]
    assert measures.skewness_ratio(NOTHING[0], 4) == 1
    # Ranges of 2, 3 and 3 units have 1, 2 and 0: densities 1/2, 2/3 and 0, of 3/8 in all.
    units = as_sets([0, 2, 3])[0]
    assert measures.skewness_ratio(units, 3) == pytest.approx((2 / 3) / (3 / 8))


# --- Definition 8.


def test_imbalance():
    owners = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    sets = as_sets([0, 1, 2, 4], [4, 5])
    # Rank 1 sends both to part 1: twice its half. The union has 3 and 2 of 5.
    assert measures.push_imbalance(sets, owners) == 2
    assert measures.push_imbalance(sets[:1], owners, parts=2) == 2 * 3 / 4
    assert measures.pull_imbalance(sets, owners) == 2 * 3 / 5
    assert measures.push_imbalance(sets, owners % 2, parts=4) == 4
    # An empty set has no parts; neither has the union of empty ones.
    assert measures.push_imbalance(as_sets([0, 4], []), owners) == 1
    assert measures.push_imbalance(NOTHING, owners) == 1
    assert measures.pull_imbalance(NOTHING, owners) == 1
