"""Numbers that are not finite, bad input, other numbers of ranks, and `jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors
from tests import helpers
from tests.chunked import runs
from tests.transforms import test_entry


SMALL = {"k": 4, "chunk": 64}
DEFAULTS = {"values": "2bit", "over": "senders"}  # spelled out, as in `runs.rounds`
EQUAL = np.ones((runs.RANKS, runs.ROUNDS), np.float32)  # weights


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_at_once_and_does_not_stay(bad):
    grads = runs.gradients()
    grads["whole"][1, 1, 5, 7] = bad
    updates, states = runs.ran(runs.sync(**SMALL, **DEFAULTS, decay=0.95), grads)
    helpers.assert_same_on_all_ranks(updates)
    finite = lambda x: np.isfinite(x.reshape(runs.RANKS, runs.ROUNDS, -1)).all(-1)
    assert (finite(updates["whole"]) == [True, False, True, True, True]).all()
    assert finite(updates["odd"]).all()
    assert np.isfinite(states.residual.value["whole"][:, -1]).all()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"k": 0}, "k must be a positive int, got 0"),
        ({"k": 5000}, "k must be at most chunk=4096.*got 5000.*smaller k"),
        ({"chunk": 1000}, "chunk must be a square.*got 1000: take 961 or 1024"),
        ({"values": "no code"}, "values must be one of .*'2bit'.*got 'no code'"),
        ({"over": "rank"}, "over must be one of 'senders', 'ranks', got 'rank'"),
        ({"decay": 0}, r"decay must lie in \(0, 1\], got 0"),
        ({"decay": 1.5}, r"decay must lie in \(0, 1\], got 1.5"),
        ({"reduce": "max"}, "reduce"),
        ({"clip_to_median": 2}, "clip_to_median must be True or False, got 2"),
    ],
)
def test_bad_options_are_named(options, wanted):
    with pytest.raises(errors.ArgumentError, match=wanted):
        sparsejax.chunked_sync(**options)


def update_of(tx, leaf):
    """Traces an update of one leaf, made on each rank, whose parameter is [8, 6]."""

    def step(x):
        grad = leaf(x)
        return jax.tree.leaves(tx.update({"w": grad}, tx.init({"w": jnp.zeros((8, 6))})))

    program = helpers.stacked(step, 2)
    jax.eval_shape(program, jax.ShapeDtypeStruct((2, 8, 6), jnp.float32))


def rows(x):
    return sparsejax.RowGrads(jnp.arange(2, dtype=jnp.int32), x[:2], (8, 6))


def entries(x):
    indices = jnp.arange(3, dtype=jnp.int32)
    return sparsejax.SparseTensor(indices, x.reshape(-1)[:3], (8, 6))


@pytest.mark.parametrize(
    ("leaf", "kind", "wanted"),
    [
        (rows, errors.LeafError, "'w' is RowGrads.*chunked_sync.*to_dense"),
        (entries, errors.ArgumentError, "'w' is sparse already.*leave the sparsifier out"),
        (lambda x: x[:4], errors.StateError, "'w' has the shape"),
        (lambda x: x.astype(jnp.int32), errors.LeafError, "'w' is int32"),
    ],
)
def test_bad_leaves_are_named(leaf, kind, wanted):
    with pytest.raises(kind, match=wanted):
        update_of(sparsejax.chunked_sync(), leaf)


def test_weights_of_other_ranks_are_refused():
    grads = runs.gradients()
    weights = np.ones((runs.RANKS, runs.ROUNDS, 2), np.float32)
    with pytest.raises(errors.ArgumentError, match=r"weight must be.*\[2\]"):
        runs.ran(runs.sync(**SMALL), grads, weights)


@pytest.mark.slow
def test_what_is_not_finite_does_not_wait_for_a_weight():
    """A rank of weight 0 keeps its numbers, and its NaN is not sent a round later."""
    grads, weights = runs.gradients(), EQUAL.copy()
    weights[1, 0] = 0
    for x in grads.values():
        x[1, 0] = np.nan
    whole = grads["whole"]
    whole[1, 0, 0, :12] = 3
    tx = runs.sync(**SMALL, decay=0.5)
    updates, states = runs.ran(tx, grads, weights)
    for name, x in states.residual.value.items():
        assert np.isfinite(x).all()
        assert np.isfinite(updates[name]).all()
    np.testing.assert_array_equal(states.residual.value["whole"][1, 0, 0, 0, :12], 3)
    assert np.isfinite(states.norm).all()


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_residuals_go_to_fewer_ranks(reduce, tmp_path):
    """Of a mean each keeps what ranks had on average, of a sum it is a share of all."""
    tx = optax.chain(sparsejax.chunked_sync(**SMALL, reduce=reduce), optax.sgd(0.1))
    params = {"w": jnp.zeros((16, 12)), "b": jnp.zeros(5)}
    state = sparsejax.init(tx, params, helpers.mesh_of(4))
    rng = np.random.default_rng(0)
    draw = lambda x: rng.standard_normal(x.shape).astype(x.dtype)
    held = jax.tree.map(draw, state[0].residual.value)
    state = (state[0]._replace(residual=state[0].residual.with_value(held)), *state[1:])
    sparsejax.save(tmp_path / "state", state)
    fresh = sparsejax.init(tx, params, helpers.mesh_of(2))
    restored = sparsejax.restore(tmp_path / "state", fresh)
    for after in (restored, sparsejax.resized(state, like=fresh)):
        scale = 1 / 2 if reduce == "mean" else 1
        for name, x in sparsejax.residuals(after).items():
            assert x.shape[0] == 2
            np.testing.assert_allclose(np.sum(x, 0), scale * held[name].sum(0), rtol=1e-5)


@pytest.mark.slow
def test_under_jit_each_shard_is_exchanged_across_replicas():
    """Of partial sums; stacked by replica they go to owners, in `test_owners`."""
    mesh, spec = helpers.grid(replica=4, fsdp=2), P("fsdp", None)
    tx = sparsejax.chunked_sync("replica", **SMALL, reduce="sum", decay=0.95)
    rng = np.random.default_rng(0)
    x = rng.integers(-50, 51, (mesh.size, *test_entry.SHAPE)).astype(np.float32)
    wanted, state = test_entry.in_shard_map(tx, mesh, spec, x)
    found, after = test_entry.summed(tx, mesh, spec, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    own, others = (sparsejax.residuals(s)["w"] for s in (after, state))
    np.testing.assert_allclose(own, others, rtol=1e-5, atol=1e-4)
    own, others = (sparsejax.metrics(s)["sync/wire_bytes"] for s in (after, state))
    assert float(own) == float(others) > 0


@pytest.mark.slow
def test_weights_under_jit_are_an_array_of_all_ranks():
    mesh, spec = helpers.grid(replica=4), P()
    tx = sparsejax.chunked_sync("replica", **SMALL, reduce="sum")
    rng = np.random.default_rng(0)
    x = rng.integers(-50, 51, (4, 8, 8)).astype(np.float32)
    x[2] = np.nan
    params = {"w": helpers.placed(np.zeros((8, 8), np.float32), mesh, spec)}
    grads, state = {"w": helpers.partial_sums(x, mesh)}, sparsejax.init(tx, params)
    results = []
    for where in (P(), P("replica")):
        weight = helpers.placed(np.array([1, 2, 0, 1], np.float32), mesh, where)
        out, _ = jax.jit(tx.update)(grads, state, params, weight=weight)
        results.append(np.asarray(out["w"]))
    assert np.isfinite(results[0]).all()
    np.testing.assert_array_equal(*results)


def test_a_parameter_that_is_sharded_over_the_ranks_is_refused():
    mesh, spec = helpers.grid(replica=4), P("replica", None)
    tx = sparsejax.chunked_sync("replica", **SMALL, reduce="sum")
    x = np.ones((4, *test_entry.SHAPE), np.float32)
    with pytest.raises(errors.ArgumentError, match="'w' is sharded over the axis of the"):
        test_entry.summed(tx, mesh, spec, x)


@pytest.mark.slow
def test_narrow_gradients_come_out_narrow_and_leave_wide_residuals():
    grads = {"odd": runs.gradients(dtype=jnp.bfloat16)["odd"]}
    updates, states = runs.ran(runs.sync(**SMALL), grads)
    assert {x.dtype for x in updates.values()} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in states.residual.value.values()} == {np.dtype(np.float32)}


def test_leaves_without_numbers_come_out_empty():
    grads = {"none": np.zeros((2, 3, 0, 5), np.float32)}
    updates, _ = runs.ran(sparsejax.chunked_sync(), grads, ranks=2)
    assert updates["none"].shape == (2, 3, 0, 5)


@pytest.mark.slow
def test_weights_of_data_parallel_are_those_of_a_mean_over_ranks():
    """They scale gradients, which a division by senders would leave scaled."""
    loss = lambda params, batch: jnp.sum(params["w"] * batch["g"][0])
    grads = np.random.default_rng(0).standard_normal((2, 8, 8)).astype(np.float32)
    batch = {"g": grads, "n": np.array([3, 0], np.float32)}

    def step(**options):
        sync = sparsejax.chunked_sync(**SMALL, values="float32", **options)
        tx = optax.chain(sync, optax.sgd(1.0))
        trainer = sparsejax.data_parallel(
            loss, tx, helpers.mesh_of(2), weight=lambda batch: batch["n"][0]
        )
        return trainer.step(trainer.init({"w": jnp.zeros((8, 8))}), batch)[0].params["w"]

    moved = -np.asarray(step(over="ranks"))
    assert (moved != 0).sum() == 4
    np.testing.assert_allclose(moved[moved != 0], grads[0][moved != 0], rtol=1e-6)
    with pytest.raises(errors.ArgumentError, match=r"weight= .*over=\"ranks\""):
        step()


@pytest.mark.parametrize("values", ["float32", *helpers.slow("2bit")])
def test_a_rank_that_has_only_zeros_sends_nothing(values):
    """Some of a block are sent, whatever they are: they do not count among the senders."""
    grads = {"w": np.random.default_rng(0).standard_normal((2, 1, 16, 8))}
    grads = {"w": grads["w"].astype(np.float32)}
    grads["w"][0, 0, 0, :2] = 9  # of equal magnitudes the first are sent
    tx = sparsejax.chunked_sync(**SMALL, values=values)
    alone, _ = runs.ran(tx, {"w": grads["w"][:1]}, ranks=1)
    grads["w"][1] = 0
    updates, _ = runs.ran(tx, grads, ranks=2)
    np.testing.assert_array_equal(updates["w"][0], alone["w"][0])
