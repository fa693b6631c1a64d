"""What is counted: loads, what they need at least, their times, and ceilings of steps."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

from benchmarks.device import ceilings, compiled, costs, graphs, loads
from benchmarks.device.traffic import Work
from benchmarks.device.walk import Counts


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_a_step_that_takes_more_than_its_ceiling_is_named(kernels):
    which = ceilings.SMALL, "zen", kernels
    most = ceilings.CEILINGS[which]
    assert ceilings.exceeded(*which, most) == []
    for field in most._fields:
        over = most._replace(**{field: getattr(most, field) + 1})
        (line,) = ceilings.exceeded(*which, over)
        assert f" on 65,536 x 64 takes {field}" in line
        assert ("zen by triton" in line) == (kernels == "triton")


@pytest.mark.parametrize("by_ptx", [True, False])
def test_a_step_by_triton_has_to_be_one_graph_where_jax_launches_it(monkeypatch, by_ptx):
    """Custom calls of jax-triton are never captured."""
    outside = graphs.Graphs(captured=1, outside={"kCustomCall": 2}, graphs=3, asks=4)
    one = compiled.Counted(Counts(), 0, 0.0, mock.Mock(), outside)
    monkeypatch.setattr(ceilings.compiled, "counted", lambda *_: one)
    monkeypatch.setattr(ceilings, "by_ptx", lambda: by_ptx)
    wrong = ceilings.check(mock.Mock(), mock.Mock(), ["triton"])
    assert len(wrong) == by_ptx
    assert all("is 3 CUDA graphs, not one" in line for line in wrong)


def test_a_load_of_listed_rows_counts_each_row_of_a_rank_once():
    load = loads.Load("listed", 512, 4, 0.0, 512, listed=64)
    sets, ids = load.sets(), load.ids()
    assert ids.shape == (loads.RANKS, 64)
    assert [set(row) for row in ids] == [set(np.flatnonzero(flags)) for flags in sets]
    assert load.counts.push.sum(1).tolist() == [len(set(row)) for row in ids]
    assert load.counts.pull.sum() == len(set(ids.reshape(-1)))
    # Ids and rows read, those of the sum written.
    assert load.least_moved == 4 * 5 * (64 + len(set(ids.reshape(-1))))


def test_times_follow_from_the_costs_of_a_file(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('{"launch": 1e-6, "memory": 1e12, "reached": 0.5}')
    cost = costs.Costs.read(str(path))
    # Of three kernels each takes longest to do something else: 20 us each.
    works = [Work(4e6, 6e6), Work(0, 5e6, 20e-6 * cost.operations), Work(0, 0, 1, 1e5)]
    counts = Counts(20, 3, 4e6, 11e6, kernels=[(1.0, work) for work in works])
    cost = dataclasses.replace(cost, scattered=20e-11)
    times = {"launching": 20e-6, "waiting": 30e-6, "moving": 30e-6}
    times |= {"computing": 10e-6, "scattering": 20e-6}
    assert cost.seconds(counts) == pytest.approx(times)
    assert cost.source == "costs.json"
    # 25 Gbit are 3.125 GB.
    assert costs.on_wire(3.125e9, 25) == pytest.approx(1)
    path.write_text('{"lunch": 1}')
    with pytest.raises(ValueError, match=r"has lunch; costs are .*launch"):
        costs.Costs.read(str(path))


def test_the_least_of_a_load_is_its_entropy_and_its_values():
    load = loads.Load("half", 1 << 16, 1, 0.5, 1 << 16)
    own, of_sum = load.densities
    assert own == pytest.approx(0.5, abs=0.01)
    assert of_sum == pytest.approx(1, abs=1e-3)
    # A bit and four bytes for each unit that a rank may have, four for each of the sum; a
    # sixteenth stays.
    least = (1 / 8 + 4 * own + 4 * of_sum) * 65_536 * 15 / 16
    assert load.least_sent == pytest.approx(least, rel=2e-3)
    assert load.least_moved == 2 * 4 * 65_536
