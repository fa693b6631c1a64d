"""The table of the examples' workloads: its sides, its rows, and that it is up to date."""

import json

import numpy as np
import pytest

from benchmarks.workloads import (
    accuracy,
    by_columns,
    collected,
    curves,
    network,
    options,
    table,
)
from tests.examples import tiny


def taken(name, folder, *options):
    example = tiny.EXAMPLES[name]
    given = [*example.data(folder), "--devices", str(example.devices), "--json", *options]
    return collected.collect(name, given, example.size)


@pytest.mark.slow
def test_tables_by_columns_train_as_those_of_the_example(tmp_path):
    name = "translation"  # with most tables
    session = taken(name, tmp_path, "--steps", "6", "--sync", "dense", "rows")
    dense, rows = session.trainings.values()
    drawn = rows.batches(0)
    batches = [next(drawn) for _ in range(6)]
    rooms = by_columns.rooms(name, batches, session.mesh.size)
    ours = by_columns.by_columns(name, rows, session.mesh, rooms)
    want = session.really_train("dense", dense)
    assert len(set(want.losses)) == 6
    for sync, training in (("rows", rows), ("embrace", ours)):
        got = session.really_train(sync, training)
        np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
        assert got.replicas_equal
        assert got.scores.keys() == want.scores.keys()
        for key, score in want.scores.items():
            np.testing.assert_allclose(got.scores[key], score, rtol=1e-5)
    sent = by_columns.lookups(name, ours.params, batches[0], session.mesh, rooms)
    width = sum(x.shape[1] for x in by_columns.tables_of(name, rows.params).values())
    assert 0 < sent < 4 * width * 2 * sum(rooms.values())


def write(folder, part, *rows):
    head = {"jax": "0.10.2", "cores": 2, "processor": "P", "date": "2026-01-02"}
    lines = [json.dumps(row) for row in (head | {"command": f"python {part}"}, *rows)]
    (folder / f"workloads-{part}-{table.JAX}.jsonl").write_text("\n".join(lines) + "\n")


def trained(scheme, seed, loss, sent):
    of = {"example": "translation", "steps": 7, "devices": 8, "replicas_equal": True}
    return of | {"scheme": scheme, "seed": seed, "final_loss": loss, "wire_bytes": sent}


def timed(scheme, hosts, seconds, numbers=1000):
    of = {"example": "translation", "rate": "250mbit", "tables": [[10, 32], [10, 32]]}
    of |= {"scheme": scheme, "hosts": hosts, "numbers": numbers, "loss": 1.0}
    return of | {"seconds": [seconds, seconds, 9.0], "replicas_equal": True}


def test_the_table_is_made_of_recorded_rows(tmp_path):
    assert table.block(tmp_path) == "Nothing of it is recorded yet.\n"
    runs = [trained("dense", seed, 2.0 + seed, 800) for seed in (0, 2)]
    write(tmp_path, "accuracy", *runs, trained("zen", 0, 3.0, 100))
    sides = [
        timed("dense", 16, 2.0),
        timed("zen", 16, 0.25),
        timed("PyTorch, dense", 16, 4),
    ]
    write(tmp_path, "network", timed("zen", 16, 7.0, 500), *sides)
    made = table.block(tmp_path)
    lines = made.splitlines()
    assert lines[2:5] == [
        "| translation | dense | loss 3.0000 ± 1.0000 | 800 | - | 0.50 |  |",
        "|  | zen | loss 3.0000 ± 0.0000 | 100 (8.0 times less) | - | 4.00 (8.0) | "
        "1.51 x OmniReduce (NMT, 16 machines) |",
        "|  | PyTorch, dense | - | - | - | 0.25 (0.5) |  |",
    ]
    assert "after 7 steps on 8 simulated devices, 2 seeds" in made
    assert "translation, 1,000 numbers, 64% in 2 tables of 10 x 32." in made
    assert made.count("last by `python ") == 2
    page = "a\n<!-- workloads: x -->\nold\n<!-- end of workloads -->\nb\n"
    whole = table.readme(page, tmp_path)
    assert whole == page.replace("old\n", made)


def test_the_table_is_up_to_date():
    """`python -m benchmarks.workloads table` writes what is there."""
    page = table.PAGE.read_text()
    assert table.block() in page
    assert page == table.readme(page)


def curve(scheme, seconds, losses):
    elapsed = [seconds * step for step in range(1, len(losses) + 1)]
    of = {"example": "click_model", "hosts": 16, "rate": "250mbit", "scheme": scheme}
    return of | {"elapsed": elapsed, "losses": losses, "replicas_equal": True}


def test_a_curve_says_when_the_dense_runs_last_loss_is_reached(tmp_path):
    falling = [10.0 - step for step in range(10)]
    rows = [curve("dense", 2.0, falling), curve("rows", 0.5, falling)]
    rows.append(curve("worse", 0.1, [loss + 1 for loss in falling]))
    dense, ours, worse = curves.compared(rows)
    assert (dense["reached"], dense["share"]) == (20, 1)
    assert (ours["reached"], ours["share"]) == (5, 0.25)
    assert (worse["reached"], worse["share"]) == (None, None)
    assert curves.smooth(falling)[:5] == [None] * 4 + [8.0]
    lines = curves.lines(ours)
    assert [line["step"] for line in lines] == [*range(1, 11)]
    assert lines[-1] == lines[0] | {"step": 10, "seconds": 5.0, "loss": 1.0}
    path = tmp_path / "curve.png"
    curves.draw(rows).savefig(path)
    assert path.stat().st_size > 5_000


def test_losses_and_replicas_are_compared_with_dense():
    rows = [timed("dense", 4, 1.0), timed("zen", 4, 0.5), timed("spardl", 4, 0.5)]
    rows[1]["loss"] = rows[2]["loss"] = 1.01
    dense, zen, spardl = network.compared(rows)
    assert (dense["gain"], zen["gain"]) == (1, 2)
    assert network.complaint(dense) == network.complaint(spardl) == ""
    assert network.complaint(zen) == "LOSS DIFFERS"
    assert network.complaint(dense | {"replicas_equal": False}) == "REPLICAS DIFFER"


def on_hosts(kind, folder, task="language_model", **given):
    """Settings of an example, a small language model, on data of its own."""
    given |= {"examples": (task,), "task": task, "data": str(folder)}
    argv = tuple(tiny.EXAMPLES[task].data(folder))
    rows = 9_000 if task in options.WITH_TABLES else 0
    return kind(rows=rows, small=True, argv=argv, timeout=300.0, **given)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("compiled_fast")
def test_devices_of_a_host_share_a_model(tmp_path):
    given = on_hosts(options.Settings, tmp_path, "transformer_tp", steps=1, rounds=1)
    rows = network.compared(network.measured(2, given))
    assert [row["scheme"] for row in rows] == ["dense", "dgc"]
    assert not any(map(network.complaint, rows))
    dense, dgc = (row["loss"] for row in rows)
    assert dense != dgc


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("compiled_fast")
def test_a_curve_has_all_steps_of_all_sides(tmp_path):
    names = ("dense", "embrace")
    settings = on_hosts(options.CurveSettings, tmp_path, systems=names, steps=7, turn=3)
    dense, ours = curves.compared(curves.measured(2, settings))
    assert (dense["scheme"], ours["scheme"]) == names
    np.testing.assert_allclose(dense["losses"], ours["losses"], rtol=1e-4)
    for row in (dense, ours):
        assert len(row["losses"]) == 7
        assert np.all(np.diff(row["elapsed"]) > 0)
        assert row["replicas_equal"]
        assert row["tables"] == [[9_000, 64]] * 2
    assert dense["share"] == 1


@pytest.mark.slow
def test_rows_of_accuracy_are_kept_and_not_repeated(tmp_path, capsys):
    given = ["--examples", "digits_vgg", "--seeds", "3", "--steps", "2", "--devices", "1"]
    given += ["--systems", "dense", "--out", str(tmp_path)]
    assert accuracy.main(given) == 0
    (path,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [(row["scheme"], row["ranks"], row["seed"]) for row in rows] == [("dense", 1, 3)]
    assert 0 <= rows[0]["accuracy"] <= 1
    assert "digits_vgg, seed 3" in capsys.readouterr().out
    assert accuracy.main(given) == 0
    assert "digits_vgg, seed 3" not in capsys.readouterr().out
    assert [json.loads(line) for line in path.read_text().splitlines()[1:]] == rows
