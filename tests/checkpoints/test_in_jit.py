"""A run under `jit` on replicas of shards goes on from a checkpoint on another mesh."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from tests import helpers
from tests.helpers import exact_model


pytest.importorskip("orbax.checkpoint")

SAVED_ON, STEPS = (4, 2), 3
RATE, MOMENTUM = 0.25, 0.5  # powers of two, so that parameters are exact
CHAINS = {
    "zen": optax.chain(exact_model.sync(), optax.sgd(RATE, momentum=MOMENTUM)),
    "dgc": optax.chain(exact_model.dgc(0.01), exact_model.sync(), optax.sgd(RATE)),
}
BATCHES = list(exact_model.batches(2 * STEPS))
FIRST, LATER = BATCHES[:STEPS], BATCHES[STEPS:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder and the run of each chain, trained and saved once."""

    @functools.cache
    def run_of(name):
        run = exact_model.Run(CHAINS[name], exact_model.mesh_of(*SAVED_ON)).train(FIRST)
        path = tmp_path_factory.mktemp("in jit") / name
        sparsejax.save(path, {"params": run.params, "opt_state": run.state})
        return path, run

    return run_of


def restored(path, name, sizes):
    """The run on another mesh, as a script goes on with it."""
    run = exact_model.Run(CHAINS[name], exact_model.mesh_of(*sizes))
    like = {"params": run.params, "opt_state": run.state}
    found = sparsejax.restore(path, like)
    places = lambda tree: [x.sharding for x in jax.tree.leaves(tree)]
    assert places(found) == places(like)
    run.params, run.state = found["params"], found["opt_state"]
    return run


@pytest.mark.parametrize("sizes", [(1, 1), *helpers.slow(((2, 4),))])
def test_a_lossless_run_goes_on_as_dense_training(saved, sizes):
    run = restored(saved("zen")[0], "zen", sizes).train(LATER)
    for path, found in run.params.items():
        wanted = velocity = np.zeros(found.shape, np.float32)
        for batch in BATCHES:
            velocity = MOMENTUM * velocity + exact_model.gradient(batch)[path]
            wanted = wanted - RATE * velocity
        np.testing.assert_array_equal(found, wanted)
    assert int(sparsejax.metrics(run.state)["sync/exchanges"]) == len(BATCHES)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 4), (1, 1)])
def test_what_replicas_hold_back_is_kept_where_their_number_changes(saved, sizes):
    """What was sent, and what is held, are the sum of all gradients, before and after."""
    path, before = saved("dgc")
    run = restored(path, "dgc", sizes)
    held = lambda run: jax.tree.map(
        lambda x: np.asarray(x).sum(0), sparsejax.residuals(run.state)
    )
    for name, wanted in held(before).items():
        np.testing.assert_array_equal(held(run)[name], wanted)
        assert wanted.any() or name == "bias"
    run.train(LATER)
    for name, rest in held(run).items():
        given = sum(exact_model.gradient(batch)[name] for batch in BATCHES)
        sent = -np.asarray(run.params[name]) / RATE
        np.testing.assert_array_equal(sent + rest, given)
        assert rest.any() or name == "bias"


def test_buckets_of_leaves_that_are_sharded_otherwise_are_other_ones(tmp_path):
    """The states of schemes begin anew, and residuals keep their sum."""
    tx = sparsejax.ok_topk_sync(0.2, "replica", reduce="sum", rules={"": "sparse"})

    def run(replicas, specs):
        mesh = helpers.grid(replica=replicas, fsdp=2)
        params = {name: np.zeros((16, 8), np.float32) for name in specs}
        params = helpers.placed(params, mesh, specs)
        rng = np.random.default_rng(0)
        drawn = rng.integers(-4, 5, (mesh.size, 16, 8)).astype(np.float32)
        grads = {name: helpers.partial_sums(drawn, mesh) for name in params}
        with jax.set_mesh(mesh):
            state = sparsejax.init(tx, params)
            return jax.jit(tx.update)(grads, state, params)[1], state

    held = lambda state: jax.tree.map(
        lambda x: np.asarray(x).sum(0), sparsejax.residuals(state)
    )
    state, _ = run(4, {"a": P("fsdp"), "b": P("fsdp")})
    _, fresh = run(2, {"a": P("fsdp"), "b": P()})
    sparsejax.save(tmp_path / "state", state)
    moved = held(sparsejax.restore(tmp_path / "state", fresh))
    for name, x in held(state).items():
        np.testing.assert_array_equal(moved[name], x)
        assert x.any()
