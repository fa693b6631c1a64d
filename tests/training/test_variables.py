"""Variables: averaged over ranks or kept by rank, seen by specs, resized."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.errors import ArgumentError, StateError
from sparsejax.state.per_rank import PerRank
from tests.helpers import grid, mesh_of
from tests.training import model


KEY = jax.random.key(7)


def traced(loss_fn, mesh=None, params=None, param_specs=None, values=None, **options):
    """The shapes after a step of a trainer with variables."""
    mesh = mesh or mesh_of(2)
    tx = optax.chain(sparsejax.dense_sync("data"), optax.sgd(0.5))
    trainer = sparsejax.data_parallel(
        loss_fn, tx, mesh, axis_name="data", param_specs=param_specs, **options
    )
    params = {"w": np.float32(1)} if params is None else params
    state = trainer.init(params, variables={"n": 0.0} if values is None else values)
    batch = np.ones(4, np.float32)
    return state, jax.eval_shape(trainer.compiled(state), state, batch)


def test_they_are_averaged_or_kept_by_rank():
    state, trainer = model.first(), model.trainer()
    average, seen = 0.0, np.zeros(model.RANKS)
    for step in range(3):
        batch = model.batch_of(step)
        state, _ = trainer.step(state, batch)
        by_rank = batch["x"].reshape(model.RANKS, -1).astype(np.float64)
        average = 0.5 * (average + by_rank.mean())
        seen += by_rank.sum(1)
    found = state.variables
    np.testing.assert_allclose(found["average"]["x"], average, rtol=1e-6)
    assert found["average"]["x"].sharding.spec == P()
    assert int(found["steps"]) == 3
    assert isinstance(found["seen"], PerRank)
    np.testing.assert_allclose(found["seen"].value, seen, rtol=1e-6)
    # The first state is of the types and in the places of all others, so that nothing is
    # compiled twice.
    kinds = lambda state: [(x.aval, x.sharding) for x in jax.tree.leaves(state)]
    assert kinds(model.first()) == kinds(state)


def test_specs_say_which_differ_by_rank():
    specs = sparsejax.state_specs(model.first())
    assert specs.variables["seen"].value == P("data")
    assert (specs.variables["average"]["x"], specs.variables["steps"]) == (P(), P())
    assert specs.key == P()


def test_on_other_ranks_they_are_an_error_until_they_are_resized():
    def loss(params, batch, *, variables):
        seen = {"seen": variables["seen"] + jnp.mean(batch)}
        return params["w"] * jnp.mean(batch), variables | seen

    def made(ranks):
        tx = optax.chain(sparsejax.dense_sync(), optax.sgd(0.5))
        trainer = sparsejax.data_parallel(loss, tx, mesh_of(ranks), variables="by_rank")
        return trainer, trainer.init(
            {"w": np.float32(1)},
            variables={"seen": 0.0, "count": np.uint32(0), "key": jax.random.key(0)},
            key=None,
        )

    trainer, state = made(4)
    kept = {"seen": np.arange(4, dtype=np.float32), "key": jax.random.split(KEY, 4)}
    kept["count"] = np.uint32(2**32 - 5) + np.arange(4, dtype=np.uint32)
    state = state._replace(variables=state.variables.with_value(kept))
    trainer, fresh = made(2)
    with pytest.raises(
        StateError, match=r"'count' is kept by 4 ranks, .* are 2: .*resized"
    ):
        trainer.compiled(state)
    resized = sparsejax.resized(state, like=fresh)
    found = resized.variables.value
    np.testing.assert_array_equal(found["seen"], [1.5, 1.5])
    # What is no number to average is that of an old rank.
    np.testing.assert_array_equal(found["count"], kept["count"][:2])
    own = [jax.random.key_data(keys) for keys in (found["key"], kept["key"][:2])]
    np.testing.assert_array_equal(*own)
    jax.eval_shape(trainer.compiled(resized), resized, np.ones(2, np.float32))


@pytest.mark.parametrize("kinds", ["mean", "by_rank"])
def test_another_axis_may_shard_the_parameters(kinds):
    """A variable with the path and shape of a parameter is not taken for one."""

    def loss(params, batch, *, variables):
        changed = {"w": variables["w"] + jnp.mean(batch)}
        return jax.lax.psum(params["w"].sum(), "model") * jnp.mean(batch), changed

    w = {"w": np.ones(4, np.float32)}
    given = grid(data=2, model=2), w, {"w": P("model")}, w
    state, (after, _) = traced(loss, *given, variables=kinds)
    shapes = lambda state: [leaf.shape for leaf in jax.tree.leaves(state)]
    assert shapes(state) == shapes(after)
    assert {"mean": (4,), "by_rank": (2, 4)}[kinds] in shapes(state.variables)

    def by_shard(params, batch, *, variables):
        return loss(params, batch, variables=variables)[0], {"w": variables["w"] + rank()}

    rank = lambda: jax.lax.axis_index("model").astype(jnp.float32)
    with pytest.raises(
        ArgumentError, match="'w' that loss_fn returns differs over 'model'"
    ):
        traced(by_shard, *given, variables=kinds)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"n": 0.0, "name": "x"}, "their leaf 'name' is str: "),
        ({"n": [object()]}, "their leaf 'n/0' is object: "),
        ({"n": np.array(["a"])}, "their leaf 'n' is ndarray of str32: "),
        ("x", "this one is str: "),
    ],
)
def test_what_is_no_array_is_an_error_that_names_it(values, match):
    with pytest.raises(ArgumentError, match=f"variables must be a tree .*{match}"):
        traced(lambda p, b, *, variables: (p["w"], variables), values=values)


def test_a_key_among_them_is_kept():
    key = jax.random.key(0)
    _, (after, _) = traced(
        lambda p, b, *, variables: (p["w"], variables), values={"k": key}
    )
    assert after.variables["k"].dtype == key.dtype


def test_those_of_flax_models():
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0))
    graph, params, statistics = nnx.split(layer, nnx.Param, nnx.BatchStat)

    def loss(params, batch, *, variables):
        model = nnx.merge(graph, params, variables, copy=True)
        out = model(batch[:, None] * jnp.ones(4))
        return jnp.mean(out), nnx.state(model, nnx.BatchStat)

    state, (after, _) = traced(loss, params=params, values=statistics)
    assert jax.tree.structure(after) == jax.tree.structure(state)

    def shorter(*args, **given):
        value, changed = loss(*args, **given)
        return value, jax.tree.map(lambda x: x[:2], changed)

    with pytest.raises(ArgumentError, match=r"'mean' was float32\[4\] .* float32\[2\]"):
        traced(shorter, params=params, values=statistics)


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        (lambda v, b: {}, {}, r"'n' was float32\[\] .* and is not there .*Return all"),
        (lambda v, b: {**v, "m": b}, {}, r"'m' was not there .* is float32\[2\]"),
        (lambda v, b: {"n": v["n"] + b}, {}, r"'n' was float32\[\] .* is float32\[2\]"),
        (
            lambda v, b: {"n": v["n"].astype(jnp.bfloat16)},
            {},
            r"'n' was float32\[\] .* is bfloat16\[\]",
        ),
        (
            lambda v, b: {"n": v["n"] + (b > 0).sum()},
            {"values": {"n": np.int32(0)}},
            r"'n' is int32, .* differs by rank.*variables='by_rank'",
        ),
        (lambda v, b: v, {"variables": "sum"}, "'mean' or 'by_rank', .* got 'sum'"),
        (lambda v, b: v, {"variables": {"m": "mean"}}, "must be a tree like those"),
    ],
)
def test_what_is_not_alike_is_an_error_that_names_the_variable(change, options, match):
    def loss(params, batch, *, variables):
        return params["w"] * jnp.mean(batch), change(variables, batch)

    with pytest.raises(ArgumentError, match=match):
        traced(loss, **options)
