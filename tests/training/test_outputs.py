"""Auxiliary outputs: averaged, summed or stacked, as the user says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.errors import ArgumentError
from tests.helpers import grid, mesh_of
from tests.training import model


def evaluated(outputs, batch=None, **options):
    """What a trainer of two ranks makes of outputs, a function of a rank's share."""
    trainer = sparsejax.data_parallel(
        lambda p, b: (p["w"] * jnp.mean(b), outputs(b)),
        optax.chain(sparsejax.dense_sync("data"), optax.sgd(0.5)),
        options.pop("mesh", None) or mesh_of(2),
        axis_name="data",
        **options,
    )
    state = trainer.init({"w": np.float32(1)})
    batch = np.arange(4, dtype=np.float32) if batch is None else batch
    return trainer.evaluate(state, batch)[1]


def test_each_is_put_together_as_its_kind_says():
    batch = model.batch_of(0)
    x, by_rank = batch["x"], batch["x"].reshape(model.RANKS, -1)
    _, (loss, aux) = model.trainer().step(model.first(), batch)
    np.testing.assert_allclose(loss, x.mean(), rtol=1e-6)
    np.testing.assert_array_equal(aux["product"], x)
    assert aux["product"].sharding.spec == jax.sharding.PartitionSpec("data")
    assert aux["drawn"].shape == (len(by_rank),)
    assert aux["large"].dtype == jnp.int32
    assert int(aux["large"]) == (x > 2).sum() > 0
    assert float(aux["share"]) == 1


def test_one_kind_may_stand_for_all_of_a_tree():
    outputs = lambda b: {"x": b, "big": b > 1, "mean": (b.mean(), b.astype(jnp.bfloat16))}
    found = evaluated(outputs, aux="sum")
    np.testing.assert_array_equal(found["x"], [2, 4])
    np.testing.assert_array_equal(found["big"], [1, 1])
    assert found["mean"][1].dtype == jnp.float32
    found = evaluated(outputs, aux={"x": "mean", "big": "stack", "mean": "stack"})
    np.testing.assert_array_equal(found["x"], [1, 2])
    np.testing.assert_array_equal(found["big"], [False, False, True, True])
    np.testing.assert_array_equal(found["mean"][0], [0.5, 2.5])
    np.testing.assert_array_equal(found["mean"][1], [0, 1, 2, 3])


def test_without_a_choice_scalars_are_averaged_and_arrays_are_an_error():
    found = evaluated(lambda b: {"mean": b.mean(), "large": (b > 1).sum()}, has_aux=True)
    assert (float(found["mean"]), float(found["large"])) == (1.5, 1)
    fix = r"'logits' is an array \[2\] on each rank.*aux='stack'.*'sum' and 'mean'"
    with pytest.raises(ArgumentError, match=fix):
        evaluated(lambda b: {"logits": b}, has_aux=True)


@pytest.mark.parametrize(
    ("outputs", "aux", "match"),
    [
        (lambda b: b, "max", "aux must be 'mean', 'sum' or 'stack'.*got 'max'"),
        (lambda b: b, {"a": None}, "aux must be 'mean', 'sum' or 'stack'.*got None"),
        (lambda b: {"b": b}, {"a": "sum"}, "aux must be a tree like the auxiliary outputs"),
        (lambda b: {"name": "x"}, "mean", "'name' is str; only numbers"),
        (lambda b: jax.random.key(0), "stack", "output is key<fry>; only numbers"),
    ],
)
def test_what_cannot_be_put_together_is_an_error_that_names_it(outputs, aux, match):
    with pytest.raises(ArgumentError, match=match):
        evaluated(outputs, aux=aux)


@pytest.mark.parametrize("aux", ["mean", "stack"])
def test_what_differs_over_another_axis_is_an_error(aux):
    outputs = lambda b: {"shard": jax.lax.axis_index("model")}
    with pytest.raises(ArgumentError, match=r"'shard', differs over 'model'.*psum"):
        evaluated(outputs, aux=aux, mesh=grid(data=2, model=2))
