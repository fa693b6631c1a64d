"""Local steps inside `shard_map`: DiLoCo's formulas, conservation, equal anchors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from tests import helpers
from tests.rounds import model
from tests.rounds.model import EVERY, RANKS


ROUNDS = 5


def sparse():
    return optax.chain(sparsejax.top_k(0.25, min_size=0), sparsejax.zen_sync())


@pytest.mark.parametrize("inner", model.INNER)
def test_five_rounds_are_those_of_diloco_in_numpy(inner):
    ours, theirs = model.INNER[inner]
    with jax.enable_x64(True):
        given = model.batches(ROUNDS * EVERY, np.float64)
        tx = sparsejax.rounds.diloco(ours(), every=EVERY)
        run = model.train(tx, given)
        anchors, momentum = model.diloco(theirs, given)
        for number, wanted in enumerate(anchors):
            found = run.params[(number + 1) * EVERY - 1]
            for name, x in wanted.items():
                np.testing.assert_allclose(found[name][0], x, rtol=1e-10)
        trace = optax.tree.get(run.state.of_outer, "trace")
        for name, x in momentum.items():
            np.testing.assert_allclose(trace[name], x, rtol=1e-10)


@pytest.mark.slow
def test_one_step_a_round_is_data_parallelism():
    given = model.batches(12)
    tx = sparsejax.local_steps(optax.sgd(0.05), every=1, outer=optax.sgd(1.0))
    run = model.train(tx, given)
    plain = model.train(optax.chain(sparsejax.dense_sync(), optax.sgd(0.05)), given)
    np.testing.assert_allclose(run.losses, plain.losses, rtol=1e-5)
    for name, x in plain.params[-1].items():
        np.testing.assert_allclose(run.params[-1][name], x, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, *helpers.slow(False)])
def test_anchors_are_equal_as_bytes_and_rest_within_a_round(check_vma):
    tx = sparsejax.local_steps(optax.adam(0.02), every=EVERY, sync=sparse())
    offsets = []
    keep = lambda state: offsets.append(np.asarray(state.offset.value["w"]))
    run = model.train(tx, model.batches(2 * EVERY), check_vma=check_vma, watch=keep)
    helpers.assert_same_on_all_ranks(jax.tree.map(lambda *x: np.stack(x, 1), *run.params))
    before = model.first()["w"]
    for number, (own, offset) in enumerate(zip(run.params, offsets, strict=True), 1):
        is_due = number % EVERY == 0
        assert (own["w"][0] != before).any() == is_due
        # Ranks are at places of their own within a round, and at the anchor after it.
        assert (offset[0] != offset[1]).any() != is_due
        assert offset.any() != is_due
        before = own["w"][0]
    # Inner moments survive a round, and count its steps.
    assert np.asarray(optax.tree.get(run.state.inner.value, "count")).tolist() == [8] * 3


def test_a_half_precision_anchor_has_offsets_in_float32():
    """Steps that are too small for bfloat16 add up within a round."""
    tx = sparsejax.local_steps(optax.sgd(1e-3), every=8, outer=optax.sgd(1.0))
    mesh = helpers.mesh_of(2)
    params = {"w": jnp.full(64, 256.0, jnp.bfloat16)}
    state = sparsejax.init(tx, helpers.placed(params, mesh, P()), mesh)
    specs = sparsejax.state_specs(state)
    assert state.offset.value["w"].dtype == jnp.float32

    def on_rank(params, state, slope):
        own = sparsejax.local(params, "data", state)
        assert own["w"].dtype == jnp.bfloat16
        grads = jax.tree.map(lambda x: jnp.full_like(x, slope), own)
        updates, state = tx.update(helpers.WIRE.per_rank(grads), state, params)
        return optax.apply_updates(params, updates), state

    of = {"in_specs": (P(), specs, P()), "out_specs": (P(), specs)}
    step = jax.jit(helpers.shard_map(on_rank, mesh=mesh, **of))
    for slope in [-64_000.0] + 7 * [-250.0]:
        params, state = step(params, state, jnp.float32(slope))
    # A step of 64, and seven of 0.25: one alone is lost in 64, whose next number is 64.5 in
    # bfloat16, and in 320, whose next one is 322. The sum is 321.75.
    assert params["w"].dtype == jnp.bfloat16
    assert (np.asarray(params["w"], np.float32) == 322.0).all()


def test_further_arguments_reach_the_synchronization():
    seen = []

    def update(updates, state, params=None, *, share=None, **extra):
        seen.append(share is not None)
        return jax.tree.map(lambda x: x * share, updates), state

    weighted = optax.GradientTransformationExtraArgs(lambda _: (), update)
    sync = optax.chain(weighted, sparsejax.dense_sync(reduce="sum"))
    tx = sparsejax.local_steps(optax.sgd(1.0), every=1, outer=optax.sgd(1.0), sync=sync)

    def on_rank(share):
        params = {"w": jnp.zeros(2)}
        state = tx.init(params)
        grads = {"w": helpers.WIRE.per_rank(jnp.ones(2))}
        return tx.update(grads, state, params, share=share)[0]

    shares = np.array([0.0, 0.25, 0.75], np.float32)
    updates = helpers.run_ranks(on_rank, shares, RANKS)
    assert any(seen)
    np.testing.assert_allclose(updates["w"], -np.ones((RANKS, 2)))


@pytest.mark.parametrize("guard", ["inner", "all"])
def test_a_rank_with_a_nan_is_left_out_by_itself_or_with_all(guard):
    """Rank 1 has a NaN in its second step."""
    given = model.batches(EVERY)
    given[1]["x"][len(given[1]["x"]) // RANKS] = np.nan
    inner = optax.sgd(0.05)
    if guard == "inner":
        inner = optax.apply_if_finite(inner, 100)
    tx = sparsejax.local_steps(inner, every=EVERY, outer=optax.sgd(1.0))
    if guard == "all":
        tx = sparsejax.skip_nonfinite(tx)
        given.append(given[0])  # the step that was left out is none of the round
    run = model.train(tx, given)
    helpers.assert_same_on_all_ranks(run.params[-1])
    moved = run.params[-1]["w"][0] != model.first()["w"]
    assert moved.all()
    assert np.isfinite(run.params[-1]["w"]).all()
    if guard == "all":
        assert int(sparsejax.metrics(run.state)["skip/skipped"]) == 1
        assert not np.asarray(run.state.inner.offset.value["w"]).any()
