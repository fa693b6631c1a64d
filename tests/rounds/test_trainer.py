"""Local steps in `data_parallel`, and their states in checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from tests import helpers
from tests.rounds import model
from tests.rounds.model import EVERY, RANKS


def made(ranks=RANKS, **options):
    """A trainer, and its first state."""
    sync = optax.chain(sparsejax.top_k(0.25, min_size=0), sparsejax.zen_sync())
    tx = sparsejax.local_steps(optax.adamw(0.02), every=EVERY, sync=sync)
    mesh = helpers.mesh_of(ranks)
    trainer = sparsejax.data_parallel(model.loss_fn, tx, mesh, donate=False, **options)
    return tx, trainer, trainer.init(model.first())


def stepped(trainer, state, given):
    losses = []
    for batch in given:
        state, loss = trainer.step(state, batch)
        losses.append(float(loss))
    return state, losses


@pytest.mark.slow
def test_the_trainer_reads_the_parameters_of_each_rank():
    given = model.batches(2 * EVERY + 1)
    tx, trainer, state = made(check_every=1)
    run = model.train(tx, given)
    state, losses = stepped(trainer, state, given)
    np.testing.assert_allclose(losses, run.losses, rtol=1e-6)
    for name, x in state.params.items():
        np.testing.assert_allclose(x, run.params[-1][name][0], rtol=1e-6)
    # Within a round: the loss of the anchor is another one.
    wanted = model.loss_fn(state.params, given[0])
    np.testing.assert_allclose(trainer.evaluate(state, given[0]), wanted, rtol=1e-6)
    _, own = trainer.step(state, given[0])
    assert abs(float(own) - float(wanted)) > 1e-4


@pytest.mark.slow
def test_a_run_that_is_restored_within_a_round_goes_on_bit_for_bit(tmp_path):
    given = model.batches(2 * EVERY + 2)
    _, trainer, state = made()
    half, _ = stepped(trainer, state, given[: EVERY + 2])
    sparsejax.save(tmp_path / "run", half)
    _, other, fresh = made()
    restored = sparsejax.restore(tmp_path / "run", fresh)
    assert helpers.octets(restored) == helpers.octets(half)
    through, losses = stepped(trainer, half, given[EVERY + 2 :])
    again, others = stepped(other, restored, given[EVERY + 2 :])
    assert losses == others
    assert helpers.octets(again) == helpers.octets(through)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "steps"), [(6, EVERY + 2), (2, 2 * EVERY)])
def test_other_ranks_begin_with_the_means_of_offsets_and_moments(tmp_path, ranks, steps):
    """More ranks within a round, and fewer at its end, as where a host was lost.

    Of what a lost rank had nothing is written off: it is in the checkpoint, too.
    """
    _, trainer, state = made()
    state, _ = stepped(trainer, state, model.batches(steps))
    sparsejax.save(tmp_path / "run", state)
    _, other, fresh = made(ranks)
    found = sparsejax.restore(tmp_path / "run", fresh)
    old, new = state.opt_state, found.opt_state
    assert helpers.octets(found.params) == helpers.octets(state.params)
    (was,), (now,) = old.of_outer, new.of_outer
    assert helpers.octets(now.outer) == helpers.octets(was.outer)
    assert int(new.step) == steps
    moments = lambda opt_state: optax.tree.get(opt_state.inner.value, "nu")
    for tree in (lambda opt_state: opt_state.offset.value, sparsejax.residuals, moments):
        for name, x in tree(old).items():
            assert np.ptp(np.asarray(x), axis=0).any() or not x.any()
            mean = np.asarray(x, np.float64).mean(0)
            wanted = np.broadcast_to(mean, (ranks, *mean.shape))
            np.testing.assert_allclose(tree(new)[name], wanted, rtol=1e-6)
    counts = optax.tree.get(new.inner.value, "count")
    assert np.asarray(counts).tolist() == [steps] * ranks
    # It trains on: two more steps end the round of more ranks.
    after, _ = stepped(other, found, model.batches(2))
    assert np.asarray(after.opt_state.offset.value["w"]).any() == (ranks == 2)
    moved = np.asarray(after.params["w"]) != np.asarray(state.params["w"])
    assert moved.any() == (ranks == 6)


def test_what_is_no_floating_number_comes_from_a_rank(tmp_path):
    """Counts that differ by rank are no mean, and keys have none."""
    noise = lambda: optax.GradientTransformation(
        lambda params: {"key": jax.random.key(0), "bad": jnp.int32(0)},
        lambda updates, state, params=None: (
            updates,
            {
                "key": jax.random.fold_in(state["key"], helpers.WIRE.rank),
                "bad": state["bad"] + 2 * helpers.WIRE.rank,
            },
        ),
    )
    tx = sparsejax.local_steps(optax.chain(noise(), optax.sgd(0.1)), every=EVERY)
    run = model.train(tx, model.batches(1))
    mesh = helpers.mesh_of(5)
    like = sparsejax.init(tx, helpers.placed(model.first(), mesh, P()), mesh)
    found = sparsejax.resized(run.state, like)
    own = found.inner.value[0]
    assert np.asarray(own["bad"]).tolist() == [0, 2, 4, 0, 2]
    keys = np.asarray(jax.random.key_data(own["key"]))
    was = np.asarray(jax.random.key_data(run.state.inner.value[0]["key"]))
    np.testing.assert_array_equal(keys, was[[0, 1, 2, 0, 1]])
    sparsejax.save(tmp_path / "1", run.state)
    restored = sparsejax.restore(tmp_path / "1", like)
    assert jax.tree.structure(restored) == jax.tree.structure(found)
    assert helpers.octets(restored) == helpers.octets(found)


@pytest.mark.slow
def test_parameters_sharded_over_a_further_axis_have_offsets_that_are():
    mesh, specs = helpers.grid(data=2, model=2), {"w": P(None, "model"), "b": P("model")}
    tx = sparsejax.local_steps(
        optax.adamw(0.02), every=2, outer=optax.sgd(0.5, momentum=0.9), axis_name="data"
    )

    def loss_fn(params, batch):
        ours = jax.lax.axis_index("model") * params["w"].shape[1]
        y = jax.lax.dynamic_slice_in_dim(batch["y"], ours, params["w"].shape[1], 1)
        error = batch["x"] @ params["w"] + params["b"] - y
        return jax.lax.psum(jnp.mean(error**2) / 2, "model")

    params = {"w": model.first()["w"].T, "b": np.zeros(4, np.float32)}
    given = [{"x": b["y"][:4], "y": b["x"][:4]} for b in model.batches(5)]
    options = {"axis_name": "data", "param_specs": specs, "donate": False}
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh, **options)
    state, losses = stepped(trainer, trainer.init(params), given)
    for own in (state.opt_state.offset, optax.tree.get(state.opt_state.inner.value, "mu")):
        x = getattr(own, "value", own)["w"]
        there = NamedSharding(mesh, P("data", None, "model"))
        assert x.sharding.is_equivalent_to(there, x.ndim)
    tx = sparsejax.local_steps(
        optax.adamw(0.02), every=2, outer=optax.sgd(0.5, momentum=0.9)
    )
    alone = sparsejax.data_parallel(model.loss_fn, tx, helpers.mesh_of(2), donate=False)
    last, wanted = stepped(alone, alone.init(params), given)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    np.testing.assert_allclose(state.params["w"], last.params["w"], rtol=1e-5)
