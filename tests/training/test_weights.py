"""Uneven data: a rank counts by its weight, and one without data does not count."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.errors import ArgumentError
from tests.helpers import mesh_of
from tests.training import model


@pytest.mark.parametrize("there", [(2, 1, 2, 1), (2, 2, 0, 0), (0, 0, 1, 0)])
def test_means_are_over_the_examples_that_are_there(there):
    """The loss of a rank without data is NaN here: 0 / 0."""
    batch = model.batch_of(0, there)
    x, mask = batch["x"].astype(np.float64), batch["mask"]
    before = model.first()
    after, (loss, aux) = model.trainer().step(before, batch)
    np.testing.assert_allclose(loss, x[mask].mean(), rtol=1e-6)
    want = 1 - model.LEARNING_RATE * x[mask].mean()
    np.testing.assert_allclose(after.params["w"], want, rtol=1e-6, atol=1e-6)
    # Means of anything weigh ranks alike; sums leave out those without data.
    weight = mask.reshape(model.RANKS, -1).sum(1)
    share = weight / 2
    np.testing.assert_allclose(aux["share"], np.average(share, weights=weight), rtol=1e-6)
    by_rank = x.reshape(model.RANKS, -1)
    assert int(aux["large"]) == (by_rank[weight > 0] > 2).sum()
    seen = np.where(weight > 0, by_rank.sum(1), 0)
    np.testing.assert_allclose(after.variables["seen"].value, seen, rtol=1e-6)
    average = 0.5 * np.average(by_rank.mean(1), weights=weight)
    np.testing.assert_allclose(after.variables["average"]["x"], average, rtol=1e-6)


@pytest.mark.slow
def test_equal_weights_change_no_bit():
    batch = model.batch_of(3)
    found = []
    for weighted in (True, False):
        after, out = model.trainer(weighted).step(model.first(weighted), batch)
        found.append((after.params, after.variables, out))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_without_any_data_nothing_is_learned():
    before = model.first()
    after, (loss, aux) = model.trainer().step(before, model.batch_of(0, (0, 0, 0, 0)))
    assert np.isnan(loss)
    assert np.isnan(aux["share"])
    assert int(aux["large"]) == 0
    assert float(after.params["w"]) == 1
    assert float(after.variables["average"]["x"]) == 0
    np.testing.assert_array_equal(after.variables["seen"].value, np.zeros(model.RANKS))


def test_evaluation_weighs_as_a_step_does():
    batch = model.batch_of(0, (2, 1, 0, 1))
    loss, _ = model.trainer().evaluate(model.first(), batch)
    np.testing.assert_allclose(loss, -batch["x"][batch["mask"]].mean(), rtol=1e-6)


@pytest.mark.parametrize(
    "weight", [lambda batch: batch, lambda batch: jnp.complex64(1), lambda batch: batch[:1]]
)
def test_a_weight_is_one_number(weight):
    trainer = sparsejax.data_parallel(
        lambda p, b: p["w"] * jnp.mean(b),
        optax.chain(sparsejax.dense_sync(), optax.sgd(0.5)),
        mesh_of(2),
        weight=weight,
    )
    state = trainer.init({"w": np.float32(1)})
    with pytest.raises(ArgumentError, match=r"weight must return one number.*\.sum\(\)"):
        trainer.evaluate(state, np.ones(4, np.float32))


@pytest.mark.parametrize("weights", [(np.nan, np.nan), (1, np.nan), (2, -1)])
def test_a_weight_that_is_no_number_or_negative_shows(weights):
    trainer = sparsejax.data_parallel(
        lambda p, b: p["w"] * jnp.mean(b),
        optax.chain(sparsejax.dense_sync(), optax.sgd(0.5)),
        mesh_of(2),
        weight=jnp.sum,
    )
    state = trainer.init({"w": np.float32(1)})
    assert np.isnan(trainer.evaluate(state, np.array(weights, np.float32)))
