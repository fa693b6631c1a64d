"""Sums by owners at the ends of parts, where what is no entry must not be written."""

import numpy as np

from sparsejax import schemes
from tests import helpers


def test_the_last_slot_of_each_part_keeps_its_sum():
    n, width = 3, 1024
    scheme = schemes.BalancedParallelism()

    def run(x):
        reduced = helpers.call(scheme, x, helpers.init(scheme, x))
        return reduced.total, reduced.traffic.pull.wire

    # Few entries of many slots, so that a message has room for more.
    x = np.zeros((n, n * width), np.float32)
    x[0, width - 1 :: width] = 5
    x[1, [3, 500, 2000]] = 1
    totals, pulled = helpers.ranked(run, n)(x)
    helpers.assert_same_on_all_ranks(totals)
    np.testing.assert_array_equal(totals[0], helpers.total(x))
    assert 0 < pulled[0] < 4 * width  # by entries
