"""Batches by step, the command line, the devices, and what a host gives of a batch."""

import itertools

import jax
import numpy as np
import pytest

from examples.common import command, devices, feeding


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
