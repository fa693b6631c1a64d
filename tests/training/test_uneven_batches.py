"""Batches of several processes: all have one shape, and one that differs is refused."""

import collections

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.errors import ArgumentError, JobError, message
from sparsejax.jobs import agreement
from sparsejax.training import placing
from tests import helpers
from tests.helpers import jobs


RANKS = 4


def batch(length, kind: type = dict, dtype: type = np.float32):
    return kind(x=np.ones((length, 3), dtype), y=np.zeros(length, np.int32))


@pytest.fixture
def results(monkeypatch):
    """What processes return or raise of which each places batches of its own."""

    def of(*each, seconds=20.0, compares=True):
        monkeypatch.setattr(placing, "_TO_READ", seconds)
        everyone = tuple(range(len(each)))
        monkeypatch.setattr(agreement, "processes_of", lambda devices: everyone)
        puts, put = [], jobs.Service.key_value_set
        noting = lambda self, key, text: puts.append(key) or put(self, key, text)
        monkeypatch.setattr(jobs.Service, "key_value_set", noting)

        def place(given):
            batches = placing.Batches(helpers.mesh_of(RANKS), "data")
            batches.compares = compares
            return [batches.placed(one, "trainer.step")["x"].shape for one in given]

        calls = [lambda given=given: place(given) for given in each]
        return *jobs.run(monkeypatch, calls), len(puts)

    return of


def test_shapes_are_compared_when_they_are_new(results):
    *_, once = results([batch(8)], [batch(8)])
    steps = [batch(8)] * 9
    *shapes, puts = results(steps, steps)
    assert shapes == [[(8, 3)] * 9] * 2
    assert puts == once
    # What is equal to JAX is compared as equal, whoever gives it in another form.
    others = [batch(8), batch(8, collections.OrderedDict), batch(8, dtype=np.float64)]
    *shapes, puts = results(others, [batch(8)] * 3)
    assert shapes == [[(8, 3)] * 3] * 2
    assert puts == once


def test_a_shorter_batch_of_one_process_is_refused_by_all(results):
    *errors, _ = results([batch(8)], [batch(4)])
    for error in errors:
        assert isinstance(error, ArgumentError)
        head, x, y, fix = message(error).split("\n")
        assert head == "trainer.step: shapes differ between processes:"
        assert x.startswith("* the array 'x' is float32[2, 3] for each rank on host ")
        assert "(process 0), and float32[1, 3] for each rank on host" in x
        assert "* the array 'y' is int32[2] for each rank on host" in y
        assert fix.endswith("weight=lambda batch: batch['mask'].sum()) how much counts.")


def test_other_arrays_are_refused_by_all(results):
    *errors, _ = results([batch(8)], [batch(8) | {"z": np.ones(8)}])
    for error in errors:
        assert isinstance(error, ArgumentError)
        assert "the array 'z' is absent on host" in str(error)


def test_the_last_batch_that_is_shorter_for_one_is_named_there(results):
    steps = [batch(8)] * 3
    shapes, error, _ = results(steps, [*steps[:2], batch(4)], seconds=0.5)
    assert shapes == [(8, 3)] * 3
    assert isinstance(error, JobError)
    assert "process 1 gives trainer.step new shapes, the array 'x': float32[1, 3] for " in (
        str(error)
    )
    assert "fill up the last one, and say with" in str(error)


def test_without_a_timeout_nothing_is_compared(results):
    *shapes, puts = results([batch(8)], [batch(4)], compares=False)
    assert shapes == [[(8, 3)], [(4, 3)]]
    assert puts == 0


@pytest.mark.parametrize("timeout", [7, None])
def test_the_trainer_compares_them_if_its_init_compares(timeout):
    loss_fn = lambda params, batch: jnp.mean(params["w"] * batch)
    tx = optax.chain(sparsejax.dense_sync(), optax.sgd(0.1))
    trainer = sparsejax.data_parallel(loss_fn, tx, helpers.mesh_of(RANKS))
    trainer.init({"w": np.float32(1)}, timeout=timeout)
    assert trainer._batches.compares == (timeout is not None)
