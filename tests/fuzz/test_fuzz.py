"""A bounded part of `make fuzz`, and the fuzzer held to what it is for."""

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.wire import tiles
from tests import helpers
from tests.fuzz import __main__ as main, campaign, data, kept, laws, pool, programs, ways


ROOT = pathlib.Path(__file__).parents[2]
# By law: programs drawn besides those by which cases go all ways, and cases of all of them.
BOUNDED = {
    "sum": (1, 160),
    "tree": (2, 42),
    "chosen": (0, 16),
    "entries": (0, 16),
    "rows": (1, 100),
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


def test_what_processes_tell_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.harness.record.RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["fuzz", "--cases", "12", "--record"])
    one = {
        "cases": {"sum": 5, "rows": 1},
        "programs": {"all": 2},
        "failures": {"kept": 1, "sum": 2},
        "ways": {"sum: owners: densely": 3},
    }
    total = main._added_up([one, {**one, "failures": {}}])
    main._record(argparse.Namespace(workers=2), total, 12.3, ["rows: by owners"])
    (path,) = tmp_path.glob("fuzz-jax*.jsonl")
    head, *rows = map(json.loads, path.read_text().splitlines())
    assert head["command"] == "python -m tests.fuzz --cases 12 --record"
    assert {"date", "jax", "processor", "cores"} < {*head}
    of_sums = {"law": "sum", "cases": 10, "failures": 2, "ways": {"owners: densely": 6}}
    assert rows[0] == of_sums
    assert [row["law"] for row in rows] == ["sum", "rows", "all"]
    whole = rows[-1]
    assert (whole["cases"], whole["failures"], whole["programs"]) == (12, 3, 4)
    assert (whole["seconds"], whole["missed"]) == (12, ["rows: by owners"])


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


def test_a_way_that_no_case_goes_is_told():
    gone = {(law, way): 1 for law, names in ways.NEEDED.items() for way in names}
    assert not ways.missing(gone)
    del gone["rows", "merged by a sort"]
    assert ways.missing(gone) == ["rows: merged by a sort"]


def test_the_owner_is_that_of_the_library():
    from sparsejax.units.ownership import StripedHash

    for units, n in ((500, 3), (257, 8), (64, 2)):
        parts, _ = StripedHash().over(units, n).assign(jnp.arange(units, dtype=jnp.int32))
        np.testing.assert_array_equal(parts, data.owner_of(units, n))


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


def test_programs_are_drawn_again_alike_and_every_scheme_is_among_them():
    drawn = pool.drawn(3, 240)
    assert drawn == pool.drawn(3, 240)
    assert drawn != pool.drawn(4, 240)
    assert pool.drawn(3, 20) == drawn[:20]
    sums = {program.scheme for program in drawn if program.law == "sum"}
    assert sums == set(pool.SCHEMES)
    assert {program.law for program in drawn[:30]} == set(pool.LAWS)
    assert len(set(drawn)) > 200
