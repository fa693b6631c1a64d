"""Every example trains, goes on from a checkpoint as if nothing had been, and is exact."""

import json
import shutil

import numpy as np
import pytest

from examples import digits_vgg
from tests import helpers
from tests.examples import tiny


pytestmark = pytest.mark.slow
every_example = pytest.mark.parametrize("name", tiny.EXAMPLES)


def run(name, monkeypatch, folder, *options):
    return tiny.run(name, monkeypatch, folder, *options)


@every_example
def test_two_steps_and_two_more_are_four(name, monkeypatch, tmp_path, capsys):
    """What was stopped behind its second step, and kept the state of that, goes on."""
    sync, states = tiny.EXAMPLES[name].resumed, tmp_path / "states"
    options = ["--sync", sync, "--steps", "4", "--checkpoint", str(states)]
    whole = run(name, monkeypatch, tmp_path, *options, "--save-every", "2")[sync]
    assert len(set(whole.losses)) == 4
    assert np.isfinite(whole.losses).all()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures[sync]["final_loss"] == whole.losses[-1]
    assert figures[sync]["replicas_equal"]

    assert {path.name for path in (states / sync).iterdir()} >= {"2", "4"}
    shutil.rmtree(states / sync / "4")
    options += ["--resume", "--logdir", str(tmp_path / "curves")]
    resumed = run(name, monkeypatch, tmp_path, *options)[sync]
    assert resumed.losses == whole.losses[2:]
    curves = tiny.curves(tmp_path / "curves" / sync)
    assert curves["loss"] == pytest.approx({3: whole.losses[2], 4: whole.losses[3]})
    sent = {key.replace(" ", "_") for key in resumed.sent}
    assert {*curves} == {"loss", "seconds", *sent}
    for steps in curves.values():
        assert [*steps] == [3, 4]
    assert helpers.octets(resumed.params) == helpers.octets(whole.params)


@every_example
def test_runs_that_leave_nothing_out_agree_with_the_dense_one(name, monkeypatch, tmp_path):
    dense, *others = syncs = tiny.EXAMPLES[name].syncs
    runs = run(name, monkeypatch, tmp_path, "--steps", "50", "--sync", *syncs)
    want = np.array(runs[dense].losses)
    for sync in syncs:
        losses = np.array(runs[sync].losses)
        assert losses[-5:].mean() < losses[:5].mean(), sync
        assert runs[sync].replicas_equal, sync
    for sync in others:
        assert runs[sync].sent["sync/wire_bytes"] <= runs[dense].sent["sync/wire_bytes"]
        if sync in tiny.LOSSLESS:
            # Sums in another order, fifty times: some units in the last place of a loss.
            np.testing.assert_allclose(runs[sync].losses, want, rtol=1e-4)
        else:
            assert np.abs(runs[sync].losses - want).max() > 1e-6
        if name == "digits_vgg":  # Densely at first, with the momentum of all leaves.
            at_first = slice(digits_vgg.WARM_UP)
            np.testing.assert_allclose(
                runs[sync].losses[at_first], want[at_first], rtol=1e-3
            )
