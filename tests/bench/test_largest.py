"""Large arrays that are exchanged for real: what is drawn, and what is refused."""

import numpy as np
import pytest

from benchmarks.training import largest
from benchmarks.training.largest import Settings


@pytest.mark.parametrize("case", largest.KINDS)
def test_a_unit_of_a_rank_has_one_value_and_some_are_on_both(case):
    settings = Settings(case=case, log2=16)
    places, values = largest.drawn(settings)
    last = settings.shape[0] - 1
    for of_rank, of_values in zip(places, values, strict=True):
        assert {0, last, settings.shape[0] // 2} <= set(of_rank)
        assert len(set(zip(of_rank, of_values, strict=True))) == len(set(of_rank))
    assert len(np.intersect1d(*places)) >= 100


@pytest.mark.slow
def test_a_case_runs_and_one_for_which_memory_is_short_does_not():
    row = largest.run(Settings(scheme="zen", case="rows", log2=16))
    assert row["wrong"] == ""
    assert row["units"] > largest.SETS
    assert row["memory"] > row["needed"] > 0
    row = largest.run(
        Settings(scheme="hierarchical", case="numbers", log2=30, spare=1 << 50)
    )
    assert row["needed"] > 2 * 4 * 2**30
    assert "memory" not in row
