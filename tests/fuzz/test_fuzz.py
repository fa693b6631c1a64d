"""A bounded part of `make fuzz`, and the fuzzer held to what it is for."""

import importlib.util
import os
import pathlib
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest

from sparsejax.wire import tiles
from tests import helpers
from tests.fuzz import campaign, data, kept, laws, pool, programs, ways


ROOT = pathlib.Path(__file__).parents[2]
# By law: programs drawn besides those by which cases go all ways, and cases of all of them.
BOUNDED = {
    "sum": (0, 140),
    "tree": (1, 28),
    "chosen": (0, 16),
    "entries": (0, 16),
    "rows": (0, 80),
    "messages": (0, 252),
}


@pytest.mark.slow
@pytest.mark.parametrize("law", BOUNDED)
def test_cases_hold(law):
    count, cases = BOUNDED[law]
    tried = [*ways.chosen(law), *pool.drawn(0, count, law)]
    tally = campaign.run(tried, cases, seed=0)
    assert not tally.failures, "\n".join(map(str, tally.failures))
    assert tally.cases[law] > 0.8 * cases
    assert not ways.missing(tally.ways, [law]), tally.ways


def test_every_law_is_in_the_bounded_part():
    """Messages of random words, too."""
    assert BOUNDED.keys() == laws._LAWS.keys()
    for law, (count, cases) in BOUNDED.items():
        assert cases > 0
        assert count or ways.chosen(law), law


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(kept.KEPT)))
def test_what_once_failed_holds(number):
    laws.check(*kept.KEPT[number])


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("triton") is None,
    reason="needs Triton, which is there for Linux: pip install '.[triton]'",
)
def test_kernels_of_triton_stay_inside_their_arrays():
    command = [sys.executable, "-m", "tests.fuzz.triton_words", "--cases", "8"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[0]) >= 6


SMALL = pool.Program("sum", "balanced", 2, (1023,))


def found(program, cases=60):
    programs.forget()
    failure = campaign.find_failure([program], cases, 0, campaign.Tally())
    programs.forget()
    return failure


@pytest.mark.slow
def test_what_is_broken_is_found_and_shrunk():
    """A last tile that is not packed: the smallest case has as little as shows it."""
    real = tiles._from_last

    def broken(entries, tile, one_tile, start):
        return real(entries - 1, tile, one_tile, start)

    with mock.patch.object(tiles, "_from_last", broken):
        failure = found(SMALL)
    assert failure is not None
    assert failure.program == SMALL
    assert failure.data.seed == 0
    x = data.gradients(failure.data, 2, 1, SMALL.shape, SMALL.dtype)
    assert 1 <= helpers.is_nonzero(x).sum() <= 2, "one entry of a rank, or of each"
    line = campaign.short(failure.data)
    assert eval(line, {"Data": data.Data}) == failure.data
    assert found(SMALL, 8) is None


def test_the_law_of_sums_sees_what_it_should():
    x = np.zeros((2, 1, 5), np.float32)
    x[:, 0] = [[1, np.nan, np.inf, 3e38, 1e-45], [2, 0, 0, 3e38, 0]]
    right = np.array([3, np.nan, np.inf, np.inf, 0], np.float32)
    laws.assert_sum(right, x[:, 0])
    for place, wrong in ((0, 3.00001), (1, 0), (2, 0), (2, -np.inf), (3, 1e38), (4, 1)):
        other = right.copy()
        other[place] = wrong
        with pytest.raises(AssertionError):
            laws.assert_sum(other, x[:, 0])
