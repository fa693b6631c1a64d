"""The same on meshes of both kinds: bytes of updates, states and checkpoints.

All other tests run on Explicit meshes, as `jax.make_mesh` makes them. These few run on Auto
ones, too, as `jax.sharding.Mesh` makes them, and expect the same bytes.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from tests import helpers


N, STEPS = 3, 2
SMALL = {"rules": {"": "sparse"}}
EVERY = {"min_size": 0, "density": 0.1}
SYSTEMS = {
    "zen": lambda: sparsejax.zen_sync("data", **SMALL),
    "dgc": lambda: optax.chain(sparsejax.dgc(**EVERY), sparsejax.zen_sync("data", **SMALL)),
    "accumulate": lambda: sparsejax.accumulate(sparsejax.dense_sync("data"), every=2),
    "ok_topk": lambda: sparsejax.ok_topk_sync(0.1, "data", **SMALL),
}
QUICK = [("zen", True), ("accumulate", True)]
SLOW = helpers.slow(("dgc", False), ("ok_topk", True))


def gradients():
    return {
        "table": helpers.gradients(N * STEPS, 40, 0.2, shape=(6,)).reshape(N, STEPS, 40, 6),
        "bias": helpers.gradients(N * STEPS, 5, 1.0).reshape(N, STEPS, 5),
    }


@pytest.mark.parametrize(("name", "check_vma"), [*QUICK, *SLOW])
def test_updates_and_states_have_the_same_bytes(name, check_vma):
    mesh = helpers.mesh_of(N)
    found = [
        helpers.ranks(N, mesh=each, check_vma=check_vma)(SYSTEMS[name](), gradients())
        for each in (mesh, helpers.auto(mesh))
    ]
    assert helpers.octets(found[0]) == helpers.octets(found[1])
    helpers.assert_same_on_all_ranks(found[0].updates)


def loss_fn(params, batch):
    rows = params["table"][batch["ids"]]
    return jnp.mean((rows @ params["kernel"] - batch["y"]) ** 2)


def batch_of(step):
    rng = np.random.default_rng(step)
    ids = rng.integers(0, 90, 8).astype(np.int32)
    return {"ids": ids, "y": rng.standard_normal((8, 1)).astype(np.float32)}


def trainer(ranks, kind):
    mesh = helpers.KINDS[kind](helpers.mesh_of(ranks))
    select = sparsejax.top_k(0.1, min_size=0)
    tx = optax.chain(select, sparsejax.dense_sync(), optax.adam(0.1))
    return sparsejax.data_parallel(loss_fn, tx, mesh)


def first(trainer):
    rng = np.random.default_rng(0)
    table = rng.standard_normal((90, 8)).astype(np.float32)
    return trainer.init({"table": table, "kernel": np.ones((8, 1), np.float32)})


@pytest.mark.slow
def test_a_checkpoint_of_one_kind_goes_on_on_the_other(tmp_path):
    """Saved on two ranks, continued on four; evaluated, compared and summarized there."""
    after = {}
    for old, new in (("explicit", "auto"), ("auto", "explicit")):
        before = trainer(2, old)
        state, _ = before.step(first(before), batch_of(0))
        sparsejax.save(tmp_path / old, state)
        other = trainer(4, new)
        state = sparsejax.restore(tmp_path / old, like=first(other))
        state, loss = other.step(state, batch_of(1))
        sparsejax.check_replicas(state)
        assert "all of 2 exchanges" in sparsejax.summary(state.opt_state)
        after[new] = helpers.octets((state, loss, other.evaluate(state, batch_of(2))))
    assert after["auto"] == after["explicit"]
