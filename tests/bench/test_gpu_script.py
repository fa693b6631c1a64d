"""The script for a GPU runs where there is none, on what there is: it must work at once."""

import json
import os
import select
import subprocess

import pytest

import pallas_kernels as kernels
from benchmarks.gpu import __main__ as script, copies, steps, winners
from benchmarks.gpu.context import Context
from pallas_kernels import backends


@pytest.mark.slow
def test_what_no_other_test_runs_goes_on_whatever_there_is(tmp_path, capsys):
    """All parts but the kernels' tests, figure 14, and the two that tests below call."""
    assert script.main(["--out", str(tmp_path)]) == 1
    said = "JAX sees no GPU here, only cpu; --any runs all the same"
    assert said in capsys.readouterr().out
    assert script.main(["--out", str(tmp_path), "--any", "--parts", "probe"]) == 0
    lines = (tmp_path / "gpu.jsonl").read_text().splitlines()[1:]
    parts = "contended", "largest", "sums", "winners"
    for name in parts:
        assert script.main(["--out", str(tmp_path), "--one", name]) == 0
        lines += (tmp_path / f"{name}.jsonl").read_text().splitlines()[1:]
    found = {json.loads(line)["part"] for line in lines}
    assert {"probe", *parts, "compact", "partition", "targets"} - {"winners"} <= found
    # The table of winners is one that `backends` can read.
    (table,) = json.loads((tmp_path / "winners.json").read_text()).values()
    for operation, found in table.items():
        assert hasattr(kernels, operation)
        sizes = [row["size"] for row in found]
        assert sizes == sorted(set(sizes))
        assert all(row["backend"] in backends.BACKENDS for row in found)


def test_triton_wins_where_it_is_a_tenth_faster_by_the_clock_and_on_the_device():
    def best(clock, busy):
        times = {"reference": [1.0] * 3, "triton": [9.0, clock, 0.0]}
        return winners._best(times, {"reference": 1.0, "triton": busy, "pallas": 0.1})

    assert best(0.9, 0.9) == "triton"
    assert best(0.91, 0.5) == best(0.5, 0.91) == "reference"
    assert winners._best({"reference": [1.0], "pallas": [0.1]}, {"reference": 1.0}) == (
        "reference"
    )


@pytest.mark.slow
def test_a_rank_alone_is_traced_as_one_of_sixteen(tmp_path, monkeypatch):
    """With its own messages in place of those of others the sum is as dense as theirs."""
    context = Context(tmp_path, "steps")
    monkeypatch.setattr(context, "repeats", 1)
    sides = (("zen", "reference"), ("agsparse", "reference"))
    monkeypatch.setattr(steps, "SIDES", sides)
    run, _ = script.PARTS["steps"]
    assert run(context)
    rows = {row["scheme"]: row for row in context.record.rows if row["part"] == "steps"}
    expected = 1 - (1 - 0.01) ** 16
    assert rows["zen"]["density"] == pytest.approx(expected, rel=0.03)
    assert rows["agsparse"]["density"] == pytest.approx(0.01, rel=0.05)
    monkeypatch.setattr(steps, "_density", lambda own: 0.5)
    monkeypatch.setattr(steps, "SIDES", sides[:1])
    assert not run(context)


@pytest.mark.slow
def test_copies_of_sums_and_two_runs_are_compared_as_bytes_before_all_else(
    tmp_path, monkeypatch
):
    rows = "rows", "listed rows"
    small = {name: (copies.LOADS[name][0] // 16, *copies.LOADS[name][1:]) for name in rows}
    monkeypatch.setattr(copies, "LOADS", small)
    assert next(iter(script.PARTS)) == "copies"
    context = Context(tmp_path, "copies")
    run, _ = script.PARTS["copies"]
    assert run(context)
    rows = context.record.rows
    assert {row["results"] for row in rows} == {1}
    seen = {(row["load"], "2 copies" in row["where"], row["order"]) for row in rows}
    orders = [(True, "ordered"), (False, "ordered"), (False, "in any order")]
    assert seen == {(load, *order) for load in copies.LOADS for order in orders}


@pytest.mark.parametrize("differs", ["in any order", "on a mesh"])
def test_sums_that_differ_are_told_where_they_are_to_be_ordered(
    differs, tmp_path, monkeypatch
):
    one, two = {b"a"}, {b"a", b"b"}
    how = {"ordered": None, "in any order": False}
    simulated = lambda name, how_, runs: two if how.get(differs, 0) is how_ else one
    monkeypatch.setattr(copies, "_simulated", simulated)
    on_mesh = lambda name, mesh, runs: two if differs == "on a mesh" else one
    monkeypatch.setattr(copies, "_on_mesh", on_mesh)
    context = Context(tmp_path, "copies")
    assert copies.copies(context) == (differs == "in any order")
    assert {1, 2} == {row["results"] for row in context.record.rows}


@pytest.mark.slow
def test_a_part_that_does_not_end_does_not_lose_the_others(tmp_path, monkeypatch, capfd):
    start = subprocess.Popen
    ended, held = os.pipe()

    def popen(command, **more):
        if command[-2:] == ["--one", "figure14"]:
            # With a process of its own that holds the pipe.
            command = ["sh", "-c", "sleep 600 & sleep 600"]
            more["pass_fds"] = [held]
        elif command[-2:] == ["--one", "sums"]:
            rows = tmp_path / "sums.jsonl"
            command = ["sh", "-c", f"echo '{{}}' > {rows}; echo '\"sums\"' >> {rows}"]
        return start(command, **more)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setitem(script.PARTS, "figure14", (None, 1))
    names = "--parts", "figure14", "sums"
    assert script.main(["--out", str(tmp_path), "--any", *names]) == 1
    printed = capfd.readouterr().out
    assert "figure14 was stopped after 5 s" in printed
    assert "NOT WELL: figure14;" in printed.splitlines()[-1]
    assert (tmp_path / "gpu.jsonl").read_text() == '{}\n"sums"\n'
    # What it had started has ended too: nobody holds the pipe.
    os.close(held)
    assert select.select([ended], [], [], 10.0)[0]
    assert os.read(ended, 1) == b""
    os.close(ended)
