"""Batches by step, the command line, the devices, and what a host gives of a batch."""

import io
import itertools
import json
import math
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from rich.console import Console

from examples.common import command, devices, feeding, report


SENT = {
    f"sync/{group}{key}": 1.0
    for group in ("", "all/")
    for key in ("wire_bytes", "payload_bytes", "dense_bytes")
}


def test_a_run_that_goes_on_has_the_batches_that_it_would_have_had():
    arrays = {"at": np.arange(10), "half": np.arange(10) / 2}
    batches = feeding.shuffled(arrays, 4, seed=3)
    first = list(itertools.islice(batches(0), 8))
    again = list(itertools.islice(batches(3), 5))
    for want, got in zip(first[3:], again, strict=True):
        np.testing.assert_array_equal(got["at"], want["at"])
        np.testing.assert_array_equal(got["half"], want["at"] / 2)
    seen = np.concatenate([batch["at"] for batch in first])
    assert sorted(seen[:10]) == sorted(seen[10:20]) == list(range(10))
    assert seen[:10].tolist() != seen[10:20].tolist()


def test_hosts_give_parts_that_make_up_a_batch(monkeypatch):
    batch = {"x": np.arange(6), "y": np.arange(12).reshape(6, 2)}
    parts = []
    for host in range(3):
        monkeypatch.setattr(jax, "process_count", lambda: 3)
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        parts.append(devices.part(batch))
    for name, whole in batch.items():
        np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), whole)


def test_devices_that_are_not_there_are_told():
    with pytest.raises(SystemExit, match="9 devices were asked for; JAX has started 8"):
        devices.mesh(9)
    with pytest.raises(SystemExit, match="3 devices, no multiple of the 2"):
        devices.mesh(3, shards=2)
    assert dict(devices.mesh(4, shards=2).shape) == {"data": 2, "model": 2}


def test_in_a_job_all_devices_are_taken_or_the_way_to_is_told(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert devices.mesh(8).size == devices.mesh(0).size == 8
    with pytest.raises(SystemExit, match=r"has 8 devices on 2 processes: .* --devices 0"):
        devices.mesh(4)


def run_of(*losses):
    return report.Run(list(losses), SENT, {"w": np.ones(2)}, True, 0.0, 0.1, {})


def test_runs_that_went_on_from_other_steps_are_compared_where_both_have_losses():
    runs = {"dense": run_of(3.0, 2.0, 1.0), "zen": run_of(2.0, 1.5), "rows": run_of(0.0)}
    figures = report.figures(runs)
    assert figures["zen"]["largest_loss_difference"] == 0.5
    assert figures["rows"]["largest_loss_difference"] == 1.0


def test_a_run_of_two_steps_has_no_time_of_a_step_and_json_has_no_nan():
    assert report.seconds([9.0, 1.0, 3.0, 2.0]) == (7.0, 2.0)
    compiling, step = report.seconds([9.0, 1.0])
    run = run_of(3.0, math.nan)._replace(compile_seconds=compiling, step_seconds=step)
    figures = report.figures({"dense": run})

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    read = json.loads(report.as_json(figures), parse_constant=refuse)["dense"]
    assert read["steps"] == 2
    for key in ("final_loss", "compile_seconds", "step_seconds", "steps_a_second"):
        assert read[key] is None, key
    console = Console(file=io.StringIO(), width=100)
    report.show(console, figures, simulated=True)
    assert re.search(r"loss of the last step .* nan ", console.file.getvalue())


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--steps", "1"], "--steps takes at least two steps, got 1"),
        (["--devices", "-1"], "--devices takes a number of devices, or 0; got -1"),
        (["--save-every", "0"], "--save-every takes at least one step, got 0"),
        (["--resume"], "name its folder with --checkpoint"),
        (["--sync", "zen", "zen"], "--sync names each way once, got zen zen"),
    ],
)
def test_a_command_line_that_cannot_be(argv, sentence, capsys):
    parser = command.parser("some_example", "What it does.", ["dense", "zen"])
    with pytest.raises(SystemExit):
        command.parse(parser, argv)
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_imports_what_its_extra_has_and_no_more():
    code = (
        "import sys, examples.language_model\n"
        "found = {'flax', 'grain', 'orbax', 'sklearn', 'tensorboardX'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
