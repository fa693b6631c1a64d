"""A state comes back as it was, or the script ends with a sentence and nothing is lost."""

import contextlib
import resource

import jax.numpy as jnp
import numpy as np
import pytest

from examples.common import checkpoints
from examples.common.checkpoints import Checkpoints


ABOUT = {"--sync": "rows", "hosts": 2, "parameter table": "float32 3x2"}


@contextlib.contextmanager
def full_disk():
    """No file can grow beyond a few bytes, which is how a full disk shows itself."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def state(value):
    return {"table": jnp.full((300, 20), float(value))}


@pytest.fixture
def store(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path / "states", ABOUT)) as store:
        yield store


def again(store, **changes):
    """The same folder for another run."""
    return contextlib.closing(Checkpoints(store._folder, ABOUT | changes))


def refused(function, *args):
    with pytest.raises(SystemExit) as error:
        function(*args)
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


def test_a_full_disk_leaves_the_last_good_one(store):
    store.save(2, state(2))
    with full_disk():
        sentence = refused(store.save, 4, state(4))
    assert "The checkpoint of step 4 could not be written" in sentence
    assert "that of 2 is kept" in sentence
    with again(store) as after:
        restored = after.restore(state(0), steps=5)
        np.testing.assert_array_equal(restored["table"], state(2)["table"])
        after.save(4, state(4))
        assert after.last() == 4


def test_a_run_of_something_else(store):
    store.save(2, state(2))
    sentences = {
        "--sync": ("dense", "of --sync it has rows, and this run has dense"),
        "hosts": (4, "of hosts it has 2, and this run has 4"),
        "parameter table": (
            "float32 9x2",
            "it has float32 3x2, and this run has float32 9",
        ),
        "parameter bias": ("float32 3", "of parameter bias it has nothing, and this run"),
    }
    for key, (value, sentence) in sentences.items():
        with again(store, **{key: value}) as other:
            assert sentence in refused(other.restore, state(0), 5)


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


def test_what_parameters_are_called():
    described = checkpoints.described({"a": {"b": jnp.zeros((2, 3))}})
    assert described == {"parameter a/b": "float32 2x3"}
