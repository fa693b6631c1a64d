"""Every example trains, goes on from a checkpoint as if nothing had been, and is exact.

The click model and the translator train in `tests/bench/test_workloads.py`, by rows, too.
"""

import json
import shutil

import numpy as np
import pytest

from examples import digits_vgg
from examples.common.session import Session
from tests import helpers
from tests.examples import tiny


pytestmark = pytest.mark.slow
STEPS, STOPPED = 12, 10
SINCE = [*range(STOPPED + 1, STEPS + 1)]
HERE = [name for name in tiny.EXAMPLES if name not in ("click_model", "translation")]


def compile_once(monkeypatch):
    """Runs of the same name take the step of the first: a process would compile it anew."""
    train, trainers = Session.train, {}

    def with_first(self, name, trainer, *rest, **more):
        return train(self, name, trainers.setdefault(name, trainer), *rest, **more)

    monkeypatch.setattr(Session, "train", with_first)


@pytest.mark.parametrize("name", HERE)
def test_a_run_agrees_with_the_dense_one_and_one_that_was_stopped_goes_on(
    name, monkeypatch, tmp_path, capsys
):
    """Twelve steps by each synchronization, and the last two of one of them once more."""
    compile_once(monkeypatch)
    monkeypatch.setattr(digits_vgg, "WARM_UP", 8)
    states, syncs = tmp_path / "states", tiny.EXAMPLES[name].syncs
    options = ["--steps", str(STEPS), "--checkpoint", str(states)]
    saving = ["--save-every", str(STOPPED // 2)]
    runs = tiny.run(name, monkeypatch, tmp_path, *options, *saving, "--sync", *syncs)
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    for sync in syncs:
        assert figures[sync]["final_loss"] == runs[sync].losses[-1]
        assert figures[sync]["replicas_equal"]
    assert_trained_alike(name, runs)

    sync = tiny.EXAMPLES[name].resumed
    assert {path.name for path in (states / sync).iterdir()} >= {str(STOPPED), str(STEPS)}
    shutil.rmtree(states / sync / str(STEPS))
    options += ["--resume", "--logdir", str(tmp_path / "curves"), "--sync", sync]
    resumed, whole = tiny.run(name, monkeypatch, tmp_path, *options)[sync], runs[sync]
    assert resumed.losses == whole.losses[STOPPED:]
    curves = tiny.curves(tmp_path / "curves" / sync)
    assert curves["loss"] == pytest.approx(dict(zip(SINCE, resumed.losses, strict=True)))
    sent = {key.replace(" ", "_") for key in resumed.sent}
    assert {*curves} == {"loss", "seconds", *sent}
    for steps in curves.values():
        assert [*steps] == SINCE
    assert helpers.octets(resumed.params) == helpers.octets(whole.params)


def assert_trained_alike(name, runs):
    """Those that leave nothing out train as the dense one, and all learn something."""
    dense, *others = syncs = tiny.EXAMPLES[name].syncs
    want = np.array(runs[dense].losses)
    for sync in syncs:
        losses = np.array(runs[sync].losses)
        assert np.isfinite(losses).all()
        assert len(set(losses[:4])) == 4
        assert losses[-5:].mean() < losses[:5].mean(), sync
        assert runs[sync].replicas_equal, sync
    for sync in others:
        assert runs[sync].sent["sync/wire_bytes"] <= runs[dense].sent["sync/wire_bytes"]
        if sync in tiny.LOSSLESS:
            # Sums in another order, twelve times: some units in the last place of a loss.
            np.testing.assert_allclose(runs[sync].losses, want, rtol=1e-4)
        else:
            assert np.abs(runs[sync].losses - want).max() > 1e-6
        if name == "digits_vgg":  # Densely at first, with the momentum of all leaves.
            at_first = slice(digits_vgg.WARM_UP)
            np.testing.assert_allclose(
                runs[sync].losses[at_first], want[at_first], rtol=1e-3
            )
