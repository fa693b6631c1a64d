"""`sync` and its kin as optax transformations, and what they compose with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from sparsejax import schemes
from tests.helpers import compilations, mesh_of, parameters, shard_map, slow, stacked


RANKS = 4
ROWS, WIDTH = 1024, 8  # small, so that it compiles fast; a rule makes it sparse
SPARSE = {"embedding": "sparse"}
MESH = mesh_of(RANKS)


def optimizer():
    """One that is linear in the gradient, so that rounding stays rounding."""
    return optax.sgd(0.1, momentum=0.9)


def gathering(**options):
    """All entries to all: what compiles fastest."""
    return sparsejax.sync(schemes.AGSparse(), **{"rules": SPARSE, **options})


def make_params():
    rng = np.random.default_rng(0)
    return {
        "embedding": jnp.asarray(rng.standard_normal((ROWS, WIDTH)), jnp.float32),
        "kernel": jnp.asarray(rng.standard_normal((WIDTH, 5)), jnp.float32),
        "bias": jnp.zeros(5, jnp.float32),
    }


def make_batch(seed):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.integers(0, ROWS, (6 * RANKS, 3)).astype(np.int32),
        "y": rng.standard_normal((6 * RANKS, 5)).astype(np.float32),
    }


def loss_fn(params, batch):
    hidden = params["embedding"][batch["x"]].mean(1)
    out = jnp.tanh(hidden @ params["kernel"]) + params["bias"]
    return jnp.mean((out - batch["y"]) ** 2)


def train(tx, steps=3, ids=False):
    """Parameters and states after each step of a hand-written loop."""
    params = jax.device_put(make_params(), NamedSharding(MESH, P()))
    state = sparsejax.init(tx, params, MESH)
    specs = sparsejax.state_specs(state)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        shard_map,
        mesh=MESH,
        in_specs=(P(), specs, P("data")),
        out_specs=(P(), specs),
    )
    def step(params, state, batch):
        grads = jax.grad(loss_fn)(sparsejax.local(params), batch)
        extra = {"ids": {"embedding": batch["x"]}} if ids else {}
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    history = []
    with compilations() as compiled:
        for seed in range(steps):
            params, state = step(params, state, make_batch(seed))
            history.append(jax.tree.map(np.asarray, (params, state)))
    assert len(compiled) == 1, "a step was compiled twice"
    return history


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6), a, b)


def reference(steps=3):
    """What one device does with the whole batch."""
    tx, params, gradient = optimizer(), make_params(), jax.jit(jax.grad(loss_fn))
    state = tx.init(params)
    for seed in range(steps):
        updates, state = tx.update(gradient(params, make_batch(seed)), state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.map(np.asarray, params)


def test_rows_that_were_not_named_are_not_sent():
    """The ids are believed: this is what would go wrong with too few of them."""
    tx = gathering()

    def run(x):
        # An int8 does not hold the number of rows.
        grads, ids = {"embedding": x[0]}, {"embedding": jnp.array([1, -1], jnp.int8)}
        return tx.update(grads, tx.init(parameters(grads)), ids=ids)[0]["embedding"]

    x = np.ones((RANKS, ROWS, WIDTH), np.float32)
    total = jax.jit(shard_map(run, mesh=MESH, in_specs=P("data"), out_specs=P()))(x)
    want = np.zeros((ROWS, WIDTH), np.float32)
    want[1] = want[-1] = 1
    np.testing.assert_array_equal(total, want)


@pytest.mark.slow
def test_accumulating_equals_optax_multisteps_around_adam():
    """Two micro-steps of this, or MultiSteps over gradients that are averaged each time."""
    every = optax.conditionally_mask(optimizer(), lambda step: step % 2 == 1)
    ours = optax.chain(sparsejax.accumulate(gathering(), 2), every)
    theirs = optax.chain(
        sparsejax.dense_sync(), optax.MultiSteps(optimizer(), 2).gradient_transformation()
    )
    for (mine, _), (other, _) in zip(train(ours, 4), train(theirs, 4), strict=True):
        assert_same(mine, other)


def test_between_synchronizations_nothing_is_sent_and_nothing_lost():
    history = train(sparsejax.accumulate(gathering(reduce="sum"), 2, reduce="sum"), 2)
    first, second = history[0][1], history[1][1]
    assert float(sparsejax.metrics(first)["sync/wire_bytes"]) == 0
    assert float(sparsejax.metrics(second)["sync/wire_bytes"]) > 0
    held = first.pending.value["embedding"]
    assert held.shape == (RANKS, ROWS, WIDTH)
    assert np.abs(held).sum() > 0
    assert all(np.abs(x).sum() == 0 for x in jax.tree.leaves(second.pending.value))


def test_warm_up_is_dense_and_then_it_is_not():
    tx = sparsejax.warm_up(gathering(), 2)
    sent = [float(sparsejax.metrics(s)["sync/embedding/wire_bytes"]) for _, s in train(tx)]
    dense = 2 * (RANKS - 1) / RANKS * ROWS * WIDTH * 4
    assert sent[:2] == [dense, dense]
    assert sent[2] < 0.1 * dense


def test_a_leaf_that_a_rule_calls_dense_is_not_looked_at():
    """The program is that of a dense sum: nothing looks for zeros, in it or in front."""
    x = jnp.ones((RANKS, 70_000))

    def program(tx):
        state = tx.init(jnp.zeros(70_000))
        return str(jax.make_jaxpr(stacked(lambda g: tx.update(g, state)[0], RANKS))(x))

    dense = program(sparsejax.dense_sync())
    assert program(sparsejax.zen_sync(rules={".*": "dense"})) == dense
    assert program(sparsejax.zen_sync()) != dense


@pytest.mark.parametrize("make", [gathering, *slow(sparsejax.zen_sync)])
def test_dtypes_and_the_shape_of_the_state_are_kept(make):
    """optax's own conformance rules for a transformation."""
    tx = make(rules={"half": "sparse"})
    params = {
        "half": jnp.ones(2000, jnp.bfloat16),
        "small": jnp.ones((), jnp.float16),
        "none": jnp.ones((0, 3)),
    }

    def run(x):
        grads = jax.tree.map(lambda p: p * x[0].astype(p.dtype), params)
        state = tx.init(params)
        updates, after = tx.update(grads, state, params, unknown_argument=1)
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, after)
        assert jax.tree.map(lambda a: a.dtype, state) == jax.tree.map(
            lambda a: a.dtype, after
        )
        assert jax.tree.structure(state) == jax.tree.structure(after)
        lax.cond(after.step > 5, lambda: state, lambda: after)
        return updates

    got = jax.jit(shard_map(run, mesh=MESH, in_specs=P("data"), out_specs=P()))(
        np.arange(4, dtype=np.float32)
    )
    assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(lambda a: a.dtype, params)
    assert float(got["small"]) == 1.5
    np.testing.assert_array_equal(got["half"], jnp.full(2000, 1.5, jnp.bfloat16))


@pytest.mark.slow
def test_ids_are_for_the_transformation_that_holds_the_leaf():
    labels = {"embedding": "sparse", "kernel": "dense", "bias": "dense"}
    parts = {"sparse": gathering(), "dense": sparsejax.dense_sync()}
    tx = optax.chain(optax.partition(parts, labels), optimizer())
    assert_same(train(tx, ids=True)[-1][0], reference())
