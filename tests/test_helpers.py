"""The assertions that all laws share fail where they should, and say where."""

import re

import numpy as np
import pytest

from tests import helpers


def test_numbers_that_are_off_are_counted_and_placed():
    got, wanted = np.zeros((4, 3)), np.zeros((4, 3))
    got[0, 1], got[2, 1] = 1, 3
    said = (
        "zen: wrong are 2 of 12 numbers, in [0 to 2, 1 to 1], by 3 at most; the first, at "
        "[0, 1], is 1 and not 0"
    )
    with pytest.raises(AssertionError, match=re.escape(said)):
        helpers.assert_within(got, wanted, 0.5, "zen")
    helpers.assert_within(got, wanted, np.abs(got), "zen")


def test_a_nan_is_never_within():
    with pytest.raises(AssertionError, match="wrong are 1 of 2 numbers"):
        helpers.assert_within(np.array([0, np.nan]), np.zeros(2), np.inf)


def test_replicas_that_differ_in_bytes_alone_are_told():
    same, zeros = np.full((3, 2), np.nan), np.zeros((3, 5), np.float32)
    zeros[2, 4] = -0.0
    said = "rank 2 differs from rank 0 in 1 of 5 numbers, in [4 to 4] of ['zeros']"
    with pytest.raises(AssertionError, match=re.escape(said)):
        helpers.assert_same_on_all_ranks({"same": same, "zeros": zeros})
    helpers.assert_same_on_all_ranks((same, np.arange(3) * 0))
