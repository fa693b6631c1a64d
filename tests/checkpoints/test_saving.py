"""A checkpoint is written whole or not at all, and only of what is a state."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.checkpoints import storage
from sparsejax.errors import ArgumentError, StateError
from tests import helpers
from tests.checkpoints.cases import LIKE, STATE, full_disk, refused


pytest.importorskip("orbax.checkpoint")


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "run" / "2"
    sparsejax.save(path, STATE)
    return path


def test_what_is_no_state(tmp_path):
    path = tmp_path / "path"
    save = lambda state: sparsejax.save(path, state)
    refused("'a' is a object: leave it out", save, {"a": object()}, error=ArgumentError)
    refused("'a' is a ndarray", save, {"a": np.array(["a", None])}, error=ArgumentError)
    abstract = {"a": jax.ShapeDtypeStruct((3,), jnp.float32)}
    refused("without numbers", save, abstract, error=ArgumentError)
    with pytest.raises(ArgumentError, match=r"'a' is being traced: call it outside"):
        jax.jit(lambda x: save({"a": x}))(1.0)
    deleted = jnp.ones(3)
    deleted.delete()
    refused("used up", save, {"a": deleted}, error=StateError)
    tx = optax.chain(sparsejax.top_k(0.1, min_size=1), sparsejax.dense_sync())
    state = sparsejax.init(tx, {"w": jnp.zeros((50, 4))}, helpers.mesh_of(2))
    cut = jax.tree.map(lambda x: np.asarray(x)[:1] if x.ndim > 2 else x, state)
    refused("made for 2 ranks, and holds 1 rows", save, cut, error=StateError)
    assert not path.exists()


def test_a_save_logs_no_warning(tmp_path, caplog):
    sparsejax.save(tmp_path / "1", STATE)
    assert [record.message for record in caplog.records] == []


def test_what_is_there_is_kept(saved):
    other = STATE | {"w": STATE["w"] + 1}
    refused("already exists: .*replace=True", sparsejax.save, saved, other)
    foreign = saved.parent / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").touch()
    refused("no checkpoint of .* thesis.txt.* It is left as it is", sparsejax.save, foreign,
            other, replace=True)  # fmt: skip
    assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]
    np.testing.assert_array_equal(sparsejax.restore(saved, LIKE)["w"], STATE["w"])


def test_one_takes_the_place_of_another(saved):
    other = STATE | {"w": STATE["w"] + 1}
    sparsejax.save(saved, other, replace=True)
    np.testing.assert_array_equal(sparsejax.restore(saved, LIKE)["w"], other["w"])
    assert [path.name for path in saved.parent.iterdir()] == ["2"]


def test_a_full_disk_leaves_the_last_good_one(saved):
    large = STATE | {"w": np.ones((300, 30), np.float32)}
    with full_disk():
        refused("/run/2, and the one before is kept: ", sparsejax.save, saved, large,
                replace=True)  # fmt: skip
        refused("/run/4, and nothing of it is kept: ", sparsejax.save, saved.parent / "4",
                large)  # fmt: skip
    # What was written before the disk was full is gone, too.
    assert [path.name for path in saved.parent.iterdir()] == ["2"]
    np.testing.assert_array_equal(sparsejax.restore(saved, LIKE)["w"], STATE["w"])
    sparsejax.save(saved.parent / "4", large)


@pytest.mark.parametrize("renames", [0, 1])
def test_a_crash_while_one_takes_the_place_of_another(saved, monkeypatch, renames):
    """One of the two is whole, whichever it is, and the next save cleans up."""
    other, done = STATE | {"w": STATE["w"] + 1}, []
    rename = type(saved).rename

    def crashing(path, to):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(to)
        return rename(path, to)

    def naming(*given):
        monkeypatch.setattr(type(saved), "rename", crashing)
        return named(*given)

    named = storage._named
    monkeypatch.setattr(storage, "_named", naming)
    with pytest.raises(KeyboardInterrupt):
        sparsejax.save(saved, other, replace=True)
    monkeypatch.undo()
    want = STATE if renames == 0 else other
    np.testing.assert_array_equal(sparsejax.restore(saved, LIKE)["w"], want["w"])
    third = STATE | {"w": STATE["w"] + 2}
    sparsejax.save(saved, third, replace=True)
    np.testing.assert_array_equal(sparsejax.restore(saved, LIKE)["w"], third["w"])
    assert [path.name for path in saved.parent.iterdir()] == ["2"]


KILLED = """
import os, sys
import numpy as np
import orbax.checkpoint as ocp
import sparsejax
ocp.PyTreeCheckpointHandler.finalize = lambda *_: os._exit(9)
state = {"w": np.ones((2, 3), np.float32), "count": 1}
sparsejax.save(sys.argv[1], state, replace=True)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_the_last_good_one(saved):
    """All is written, and not named yet: once in place of another, once a new one."""
    new = saved.parent / "4"
    for path in (saved, new):
        done = subprocess.run([sys.executable, "-c", KILLED, path], check=False)
        assert done.returncode == 9
    assert len([*saved.parent.iterdir()]) == 3
    np.testing.assert_array_equal(sparsejax.restore(saved, LIKE)["w"], STATE["w"])
    refused("/run/4 was not finished, ", sparsejax.restore, new, LIKE)
    for path in (saved, new):
        sparsejax.save(path, STATE, replace=True)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["2", "4"]


def test_without_orbax_it_is_named(tmp_path, saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    match = r"pip install 'sparsejax\[checkpoint\]', or pip install orbax-checkpoint"
    refused(match, sparsejax.save, tmp_path / "new", STATE)
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    refused(match, sparsejax.restore, saved, LIKE)
