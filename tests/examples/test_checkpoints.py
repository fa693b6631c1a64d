"""A state comes back as it was, or the script ends with a sentence and nothing is lost."""

import jax.numpy as jnp
import numpy as np
import pytest

from examples.common.checkpoints import Checkpoints
from tests.checkpoints.cases import full_disk
from tests.examples.tiny import refused


ABOUT = {"--sync": "rows", "--seed": 2}


def state(value):
    return {"table": jnp.full((300, 20), float(value))}


@pytest.fixture
def store(tmp_path):
    return Checkpoints(tmp_path / "states", ABOUT)


def again(store, **changes):
    """The same folder for another run."""
    return Checkpoints(store._folder, ABOUT | changes)


def test_a_full_disk_leaves_the_last_good_one(store):
    store.save(2, state(2))
    with full_disk():
        sentence = refused(store.save, 4, state(4))
    assert "the checkpoint could not be written to" in sentence
    assert "The checkpoint of step 2 is kept." in sentence
    after = again(store)
    restored = after.restore(state(0), steps=5)
    np.testing.assert_array_equal(restored["table"], state(2)["table"])
    after.save(4, state(4))
    assert after.last() == 4


def test_the_last_two_are_kept(store):
    for step in (2, 4, 10):
        store.save(step, state(step))
    assert sorted(path.name for path in store._folder.iterdir()) == ["10", "4"]
    assert again(store).last() == 10


def test_a_run_of_something_else(store):
    store.save(2, state(2))
    sentences = {
        "--sync": ("dense", "of --sync it has rows, and this run has dense"),
        "--seed": (3, "of --seed it has 2, and this run has 3"),
        "the data": ("abc", "it has no about['the data'], and this run has abc"),
    }
    for key, (value, sentence) in sentences.items():
        assert sentence in refused(again(store, **{key: value}).restore, state(0), 5)
    other = {"table": jnp.zeros((300, 21))}
    sentence = refused(store.restore, other, 5)
    assert "at 'table' it has float32[300, 20], and `like` has float32[300, 21]" in sentence


def test_what_is_there_already_or_not(store, tmp_path):
    sentence = refused(store.restore, state(0), 5)
    assert "has no checkpoint to go on from: name with --sync those" in sentence
    store.require_none()
    store.save(5, state(5))
    sentence = refused(store.restore, state(0), 5)
    assert "is of step 5 already, and --steps is 5" in sentence
    assert "name with --sync the runs that are not done" in sentence
    assert "has a checkpoint of step 5: go on from it" in refused(store.require_none)
    (tmp_path / "file").touch()
    sentence = refused(Checkpoints, tmp_path / "file" / "states", ABOUT)
    assert "There can be no checkpoints in" in sentence
