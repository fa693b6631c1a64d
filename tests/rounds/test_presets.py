"""Presets: what they refuse, and where they run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors
from sparsejax.state.per_rank import find
from sparsejax.transforms.feedback import FeedbackState
from tests import helpers
from tests.rounds import given, model
from tests.rounds.test_in_jit import Run


rounds = sparsejax.rounds
SGD = optax.sgd(0.1)
DEMO = functools.partial(rounds.demo, 0.01, k=4, chunk=64)
SHAPES = {"w": (16, 12), "b": (5,)}


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: rounds.demo(k=5000), "k must be at most chunk=4096.*got 5000.*smaller k"),
        (
            lambda: rounds.demo(decay=1.0),
            r"decay must lie in \(0, 1\), got 1.0.*Take 0.999",
        ),
        (lambda: rounds.demo(weight_decay=-1), "weight_decay must be at least 0, got -1"),
        (lambda: rounds.demo(values="no code"), "values must be one of .*got 'no code'"),
        (
            lambda: rounds.flex_demo(0.1),
            "flex_demo: inner must be an optax transf.*got 0.1",
        ),
        (
            lambda: rounds.flex_demo(SGD, "slicing"),
            "replicator must be one of 'demo', 'random', 'striding', 'full', got 'slicing'",
        ),
        (lambda: rounds.flex_demo(SGD, "random", decay=1), r"decay must lie in \(0, 1\)"),
        (lambda: rounds.flex_demo(SGD, "random", share=2.0), r"in \(0, 1\], got 2.0"),
        (lambda: rounds.flex_demo(SGD, sign=1), "sign must be True or False, got 1"),
        (lambda: rounds.pulse_loco(SGD, every=0), "every must be .*got 0"),
        (lambda: rounds.pulse_loco(SGD, lr=0.0), "lr must be above 0, got 0.0"),
        (
            lambda: rounds.pulse_loco(SGD, dtype=None),
            "dtype must be .*'bfloat16', got None",
        ),
        (lambda: rounds.pulse_loco(SGD, dtype="bf16"), "Did you mean 'bfloat16'"),
    ],
)
def test_bad_options_are_named(make, wanted):
    with pytest.raises(errors.ArgumentError, match=wanted):
        make()


@pytest.mark.slow
def test_demo_takes_partial_sums_under_jit():
    """Each rank's part of a sum is its own gradient; a sign is that of the mean."""
    mesh = helpers.grid(replica=3)
    tx = DEMO(axis_name="replica", reduce="sum")
    grads = {name: x[:, 0] for name, x in given.drawn(SHAPES, 1).items()}
    params = helpers.placed(given.parameters(SHAPES), mesh, P())
    partial = {name: helpers.partial_sums(x, mesh) for name, x in grads.items()}
    updates, _ = jax.jit(tx.update)(partial, sparsejax.init(tx, params), params)
    alone = DEMO()
    wanted, _ = given.trained(
        alone, jax.tree.map(np.zeros_like, given.parameters(SHAPES)), given.drawn(SHAPES, 1)
    )
    for name, x in updates.items():
        np.testing.assert_array_equal(x, wanted[name][0, 0])
        assert np.asarray(x).any()


def gated(**options):
    """PULSELoCo, of small leaves too."""
    kind = sparsejax.sparsifiers.Visible(rate=0.5)
    visible = sparsejax.sparsify(kind, min_size=1, **options)
    sync = optax.chain(visible, sparsejax.zen_sync(**options))
    inner = optax.sgd(2e-3)
    return sparsejax.local_steps(inner, every=2, outer=optax.sgd(0.5), sync=sync, **options)


@pytest.mark.slow
def test_what_is_visible_is_read_from_shards_under_jit():
    batches = model.batches(4)
    alone = model.train(gated(), batches)
    run = Run(gated(axis_name="replica"), "auto")
    run.train(batches)
    (held,) = [x for x in find(run.state, FeedbackState) if x.residual is not None]
    (own,) = [x for x in find(alone.state, FeedbackState) if x.residual is not None]
    hidden = {name: np.asarray(x)[:, 0] != 0 for name, x in held.residual.value.items()}
    assert 0 < np.mean(hidden["w"]) < 1
    for name, x in run.params.items():
        np.testing.assert_allclose(x, alone.params[-1][name][0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            held.residual.value[name], own.residual.value[name], rtol=1e-3, atol=1e-7
        )


def test_what_is_visible_is_not_read_from_pieces_of_ranks():
    mesh = helpers.grid(replica=2)
    kind = sparsejax.sparsifiers.Visible()
    visible = sparsejax.sparsify(kind, min_size=1, axis_name="replica")
    tx = optax.chain(visible, sparsejax.zen_sync("replica", reduce="sum"))
    params = {"w": helpers.placed(np.ones((8, 4), np.float32), mesh, P("replica", None))}
    grads = {"w": helpers.partial_sums(np.ones((2, 8, 4), np.float32), mesh)}
    with pytest.raises(errors.ArgumentError, match=r"'w' is sharded .*over the axis of"):
        jax.eval_shape(tx.update, grads, sparsejax.init(tx, params), params)


@pytest.mark.slow
def test_inside_a_shard_map_that_leaves_the_fast_axis_to_xla():
    mesh = helpers.grid(data=3, fsdp=2)
    kind = sparsejax.sparsifiers.Visible(rate=0.5)
    visible = sparsejax.sparsify(kind, min_size=1, axis_name="data")
    tx = optax.chain(visible, sparsejax.zen_sync("data"), optax.sgd(0.5))
    params = given.parameters(SHAPES)
    grads = {name: 0.01 * x[:, 0] for name, x in given.drawn(SHAPES, 1).items()}
    state = sparsejax.init(tx, helpers.placed(params, mesh, P()), mesh, "data")
    specs = sparsejax.state_specs(state)

    def step(grads, state, params):
        grads = jax.tree.map(lambda x: x[0], grads)
        return tx.update(grads, state, params)[0]

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P("data"), specs, P()),
        out_specs=P(),
        axis_names={"data"},
    )
    of_shards = {"w": P("fsdp", None), "b": P()}
    placed = {name: P("data", *spec) for name, spec in of_shards.items()}
    operands = (
        helpers.placed(grads, mesh, placed),
        state,
        helpers.placed(params, mesh, of_shards),
    )
    with jax.set_mesh(mesh):
        updates = jax.jit(mapped)(*operands)
    whole = {name: x[:, None] for name, x in grads.items()}
    wanted, _ = given.trained(tx, params, whole)
    for name, x in updates.items():
        moved = wanted[name][0, 0] - params[name]
        np.testing.assert_allclose(x, moved, atol=1e-6)
        assert np.asarray(jnp.any(x != 0))
