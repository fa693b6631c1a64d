"""Wrappers around a whole chain: what sleeps, what is skipped, and what they refuse."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors, schemes
from sparsejax.units.row_grads import RowGrads
from tests import helpers


N, SIZE = 3, 600
PARAMS = {"w": jnp.zeros(SIZE)}
SPARSE = {"w": "sparse"}


def gathering():
    """What compiles fastest of what synchronizes entries."""
    return sparsejax.sync(schemes.AGSparse(), rules=SPARSE)


def draw(steps, seed=0):
    """Gradients [n, steps, ...]."""
    return np.random.default_rng(seed).standard_normal((N, steps, SIZE)).astype(np.float32)


def forbidding():
    """Forbids promotions in the user's own code, as `jax.config` does."""
    scope = contextlib.ExitStack()
    scope.enter_context(jax.numpy_rank_promotion("raise"))
    scope.enter_context(jax.numpy_dtype_promotion("strict"))
    return scope


def test_promotions_that_a_user_forbids_are_those_of_the_users_code():
    chain = optax.chain(sparsejax.top_k(0.05, min_size=1), gathering(), optax.sgd(0.1))
    tx = sparsejax.skip_nonfinite(sparsejax.accumulate(sparsejax.warm_up(chain, 2), 2))
    mesh = helpers.mesh_of(N)

    def step(x, state):
        updates, state = tx.update({"w": x[0]}, state, PARAMS)
        return updates, state, sparsejax.all_reduce(x[0], scheme=schemes.AGSparse())

    with forbidding():
        state = sparsejax.init(tx, PARAMS, mesh)
        specs = sparsejax.state_specs(state)
        specs = {"in_specs": (P("data"), specs), "out_specs": (P(), specs, P())}
        run = helpers.shard_map(step, mesh=mesh, **specs)
        shapes = jax.eval_shape(run, draw(1)[:, 0], state)
        assert shapes[0]["w"].shape == (SIZE,)
        assert sparsejax.metrics(state)
        with pytest.raises(ValueError, match="rank_promotion"):
            jnp.ones(3) + jnp.ones((2, 3))
        adam = sparsejax.lazy(optax.adam(0.1))
        rows = sparsejax.RowGrads(jnp.arange(2), jnp.ones((2, 3)), shape=(9, 3))
        table = jnp.ones((9, 3))
        read = adam.reader(table, adam.init(table))
        updates, state = adam.update(rows, adam.init(table), table, read=read)
        sparsejax.rows.settle(sparsejax.apply_updates(table, updates), state, adam)


def test_a_weight_of_each_of_several_steps_is_refused():
    def traced(every):
        tx, mesh = sparsejax.accumulate(gathering(), every), helpers.mesh_of(N)
        state = sparsejax.init(tx, PARAMS, mesh)

        def step(x, state):
            return tx.update({"w": x[0]}, state, PARAMS, weight=1.0)[0]

        specs = P("data"), sparsejax.state_specs(state)
        run = helpers.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P())
        return jax.eval_shape(run, draw(1)[:, 0], state)

    with pytest.raises(errors.ArgumentError, match=r"given weight=.* Multiply the loss"):
        traced(2)
    assert traced(1)["w"].shape == (SIZE,)


@pytest.mark.parametrize("sends", [sparsejax.zen_sync, sparsejax.dense_sync])
def test_no_array_outlives_its_trace(sends):
    """In a `shard_map` and under `jit`, by JAX's own check."""
    mesh, params = helpers.mesh_of(N), {"w": np.ones(SIZE, np.float32)}
    sync = sends("data", rules={"w": "sparse"})
    tx = sparsejax.accumulate(optax.chain(sync, optax.sgd(0.1)), 2)

    def step(x, state):
        return tx.update({"w": x[0]}, state, params)

    def under_jit(x, state):
        _, grads = sparsejax.per_replica(jax.value_and_grad(loss), "data")(params, x)
        return tx.update(grads, state, params)

    def loss(params, x):
        return jnp.sum(params["w"] * x)

    with jax.checking_leaks(), jax.set_mesh(mesh):
        state = sparsejax.init(tx, params, mesh)
        specs = sparsejax.state_specs(state)
        specs = {"in_specs": (P("data"), specs), "out_specs": (P(), specs)}
        x = helpers.placed(draw(1)[:, 0], mesh, P("data"))
        inside = jax.eval_shape(helpers.shard_map(step, mesh=mesh, **specs), x, state)
        outside = jax.eval_shape(under_jit, x, state)
    assert inside[0]["w"].shape == outside[0]["w"].shape == (SIZE,)


def sum_of_squares(tx):
    """A loss of the gradients of all ranks, [n, ...]: that of their mean."""
    mesh = helpers.mesh_of(N)
    state = sparsejax.init(tx, PARAMS, mesh)
    specs = {"in_specs": (P("data"), sparsejax.state_specs(state)), "out_specs": P()}
    send = lambda x, state: tx.update({"w": x[0]}, state, PARAMS)[0]
    run = helpers.shard_map(send, mesh=mesh, **specs)
    return lambda x: jnp.sum(run(x, state)["w"] ** 2)


def test_a_lossless_sum_has_the_derivative_of_a_dense_sum():
    """Values travel as bits, whose derivative would be 0, of which nobody hears."""
    x = draw(1)[:, 0]
    found = jax.jit(jax.grad(sum_of_squares(gathering())))(x)
    np.testing.assert_allclose(found, np.tile(2 * x.mean(0) / N, (N, 1)), rtol=1e-5)


def test_pieces_of_a_sum_have_the_derivative_of_pieces_of_a_dense_sum():
    """Under jit, where each rank trains a piece of the parameter."""
    mesh, found = helpers.mesh_of(N), []
    x = np.random.default_rng(0).standard_normal((2 * N, 12)).astype(np.float32)
    sparse = sparsejax.sync(schemes.AGSparse(), rules=SPARSE, reduce="sum")
    for tx in (sparse, sparsejax.dense_sync(reduce="sum")):
        with jax.set_mesh(mesh):
            params = {"w": jax.device_put(jnp.ones((12, 8)), P("data"))}
            state, rows = tx.init(params), jax.device_put(x, P("data"))

            def meta(scale, tx=tx, params=params, state=state, rows=rows):
                whole = jax.reshard(params, P(reduced={"data"}))
                loss = lambda p: jnp.sum(jnp.tanh(scale * rows @ p["w"]))
                updates, _ = tx.update(jax.grad(loss)(whole), state, params)
                return jnp.sum(jax.reshard(updates["w"], P()) ** 2)

            found.append(float(jax.jit(jax.grad(meta))(0.1)))
    assert found[1] != 0
    np.testing.assert_allclose(*found, rtol=1e-5)


SENDS_A_PART = {
    "a sparsifier": lambda: optax.chain(sparsejax.top_k(0.05, min_size=1), gathering()),
    "a scheme": lambda: sparsejax.sync(schemes.GTopk(0.05), rules=SPARSE),
    "chunks": sparsejax.chunked_sync,
}


@pytest.mark.parametrize("name", SENDS_A_PART)
def test_what_leaves_something_out_is_not_differentiated(name):
    with pytest.raises(errors.ArgumentError, match="stop_gradient"):
        jax.eval_shape(jax.grad(sum_of_squares(SENDS_A_PART[name]())), draw(1)[:, 0])


@pytest.mark.slow
def test_an_optimizer_inside_accumulate_sleeps():
    chain = optax.chain(sparsejax.dgc(0.05, min_size=1), gathering(), optax.adam(1e-3))
    done = helpers.ranks(N)(sparsejax.accumulate(chain, every=4), {"w": draw(9)})
    sent = done.updates["w"].any((0, 2))
    assert np.flatnonzero(sent).tolist() == [3, 7]
    counts = optax.tree_utils.tree_get_all_with_path(done.state, "count")
    assert [count.tolist() for _, count in counts] == [[2] * N]


EACH = {"w": "sparse", "embedding": schemes.AGSparse()}
SYSTEMS = {
    "gtopk": lambda: sparsejax.sync(
        schemes.GTopk(0.05),
        reduce="sum",
        rules=EACH,
        memory=sparsejax.MomentumCorrection(0.5, masking=False),
    ),
    "dgc": lambda: optax.chain(
        sparsejax.dgc(0.05, memory=sparsejax.MomentumCorrection(0.5), min_size=SIZE),
        sparsejax.zen_sync(reduce="sum", rules=SPARSE),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEMS)
def test_leaves_that_are_sent_whole_have_the_same_momentum(name):
    """Rows that only an earlier batch has touched, too, whatever `ids` of this one say."""
    tx, steps = SYSTEMS[name](), 5
    rng = np.random.default_rng(0)
    shapes = {"w": (SIZE,), "bias": (7,), "embedding": (120, 3), "half": (5,)}
    grads = {
        k: rng.integers(-8, 9, (N, steps, *shape)).astype(np.float32)
        for k, shape in shapes.items()
    }
    touched = np.arange(120) // 4 == np.arange(steps)[:, None] % 3
    grads["embedding"] *= touched[..., None]
    grads["half"] = grads["half"].astype(jnp.bfloat16)

    def update(grad, state, params):
        (rows,) = jnp.nonzero(grad["embedding"].any(axis=1), size=4)
        ids = {} if name == "dgc" else {"embedding": rows}
        return tx.update(grad, state, params, ids=ids)

    found = helpers.ranks(N)(optax.GradientTransformation(tx.init, update), grads)
    helpers.assert_same_on_all_ranks(found.updates)
    for leaf in shapes:
        assert found.updates[leaf].dtype == grads[leaf].dtype
        updates, velocities = found.updates[leaf][0].astype(np.float64), []
        for step in range(steps):
            before = velocities[-1] if velocities else 0
            velocities.append(0.5 * before + grads[leaf][:, step].astype(np.float64))
        if leaf != "w":
            want, off = np.sum(velocities, 1), 0.02 * (leaf == "half")
            np.testing.assert_allclose(updates, want, rtol=off)
        elif name == "gtopk":  # Without masking what goes, and what waits, is all of it.
            residual = sparsejax.residuals(found.state)["w"].astype(np.float64).sum((0, 1))
            want = np.sum(velocities, (0, 1))
            np.testing.assert_allclose(updates.sum(0) + residual, want, rtol=1e-4)
            assert residual.any()


def test_momentum_that_nothing_would_keep_is_refused():
    memory = sparsejax.MomentumCorrection(0.9)
    rules = {"b": schemes.AllReduce()}
    with pytest.raises(errors.ArgumentError, match=r"of Zen, AllReduce none does: give"):
        sparsejax.sync(schemes.Zen(), rules=rules, memory=memory)
    tx = sparsejax.sync(schemes.GTopk(0.05), rules={"w": schemes.Zen()}, memory=memory)

    def of_rows(x):
        grads = {"w": RowGrads(jnp.arange(2), x, (SIZE, 2))}
        return tx.update(grads, tx.init({"w": jnp.zeros((SIZE, 2))}))[0]

    with pytest.raises(errors.ArgumentError, match=r"'w' is RowGrads, and with Momentum"):
        helpers.run_ranks(of_rows, np.ones((N, 2, 2), np.float32), N)


def test_each_rank_clips_its_own_gradient_by_its_finite_numbers():
    """At the norm divided by the root of the ranks; one that is short enough stays."""
    grads = {"w": draw(1), "b": np.ones((N, 1, 3), np.float32)}
    grads["w"][1] /= 1000
    grads["b"][1] /= 1000
    clean = {name: x.astype(np.float64) for name, x in grads.items()}
    grads["w"][2, 0, 5], clean["w"][2, 0, 5] = np.nan, 0
    grads["w"][0, 0, 7], clean["w"][0, 0, 7] = np.inf, 0
    clip = sparsejax.transforms.clip_by_rank(2.0)
    tx = optax.chain(clip, sparsejax.dense_sync(reduce="sum"))
    updates = helpers.ranks(N)(tx, grads).updates
    norms = np.sqrt(sum((x**2).sum((1, 2)) for x in clean.values()))
    scale = np.minimum(2 / np.sqrt(N) / norms, 1)
    assert (scale < 1).tolist() == [True, False, True]
    for name, x in clean.items():
        want = (x[:, 0] * scale[:, None]).sum(0)
        want[5:6], want[7:8] = np.nan, np.inf  # of `w`
        np.testing.assert_allclose(updates[name][0, 0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_what_rounding_takes_from_a_sum_is_sent_with_the_next_one(reduce):
    params = {"w": jnp.zeros(SIZE, jnp.bfloat16)}
    every = 2
    tx = sparsejax.accumulate(
        sparsejax.dense_sync("data", reduce="sum"), every, "data", reduce=reduce
    )
    scale = every if reduce == "mean" else 1
    grads = jnp.asarray(draw(6), jnp.bfloat16)

    def run(grads):
        state, sent = tx.init(params), 0.0
        for x in grads[0]:
            out, state = tx.update({"w": x}, state, params)
            sent += scale * out["w"].astype(jnp.float32)
        return sent, state.pending.value["w"]

    run = helpers.shard_map(
        run, mesh=helpers.mesh_of(N), in_specs=P("data"), out_specs=(P(), P("data"))
    )
    # A sum of ranks is rounded once more, and there all have sent what they had.
    ones = jnp.where(jnp.arange(N)[:, None, None] == 0, grads, 0)
    sent, pending = jax.jit(run)(ones)
    assert np.abs(pending).max() > 0
    want = np.asarray(ones, np.float64).sum((0, 1))
    np.testing.assert_allclose(sent + np.asarray(pending).sum(0), want, atol=1e-5)


def test_what_wrappers_refuse():
    adam = optax.adam(1e-3)
    for wrap in (
        lambda tx: sparsejax.accumulate(tx, 2),
        lambda tx: sparsejax.warm_up(tx, 2),
    ):
        with pytest.raises(errors.ArgumentError, match="wraps nothing that synchronizes"):
            wrap(adam).init(PARAMS)
        with pytest.raises(errors.ArgumentError, match="wraps an optax transformation"):
            wrap(schemes.Zen())
    with pytest.raises(errors.ArgumentError, match="two would each keep"):
        sparsejax.transforms.feedback.feedback(sparsejax.zen_sync())
    with pytest.raises(
        errors.ArgumentError, match=r"memory must be sparsejax\.Residual\(\)"
    ):
        sparsejax.sync(schemes.Zen(), memory="residual")
    inside = sparsejax.accumulate(sparsejax.zen_sync(), 2)
    around = optax.MultiSteps(inside, 2).gradient_transformation()
    with pytest.raises(errors.StateError, match=r"Use sparsejax\.accumulate"):
        sparsejax.init(around, PARAMS, helpers.mesh_of(N))


def test_sums_that_wait_for_another_number_of_steps_are_refused_as_means_alone():
    """As sums they are what they are, whenever they are sent."""
    params, mesh = {"w": jnp.ones(3)}, helpers.mesh_of(2)

    def stepped(reduce, every):
        of = lambda k: sparsejax.accumulate(sparsejax.dense_sync(), k, reduce=reduce)
        state = sparsejax.init(of(4), params, mesh)
        specs = sparsejax.state_specs(state)
        update = lambda grads, state: of(every).update(sparsejax.local(grads), state)
        mapped = helpers.shard_map(
            update, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs)
        )
        return jax.eval_shape(mapped, params, state)

    stepped("mean", 4), stepped("sum", 4), stepped("sum", 2)
    with pytest.raises(errors.StateError, match=r"has every=2, .* made with every=4: what"):
        stepped("mean", 2)


@pytest.mark.parametrize("size", [1.0, 1e25, 3e36])
def test_a_rank_with_large_numbers_is_clipped_and_not_cleared(size):
    """Their squares overflow in float32."""
    clip = sparsejax.transforms.clip_by_rank(1e-3)
    tx = optax.chain(clip, sparsejax.dense_sync(reduce="sum"))
    grads = {"a": helpers.gradients(2, 40, 1.0), "b": helpers.gradients(2, 9, 1.0, seed=3)}
    large = {name: (x * size).astype(np.float32) for name, x in grads.items()}

    def run(grads):
        like = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), grads)
        return tx.update(grads, tx.init(like))[0]

    found = helpers.run_ranks(run, large, 2)
    norms = np.sqrt(sum(np.square(x.astype(float)).sum(1) for x in grads.values()))
    for name, x in grads.items():
        wanted = (x * (1e-3 * 2**-0.5 / norms)[:, None]).sum(0)
        np.testing.assert_allclose(found[name][0], wanted, rtol=1e-5)


def test_a_clip_of_several_dtypes_has_one_norm():
    """The squares of a float32 leaf overflow, those of a float64 leaf do not."""
    clip, grads = sparsejax.transforms.clip_by_rank(1.0), {"a": [1e20, 0], "b": [1.0, 2]}
    with jax.enable_x64(True):
        of = {"a": jnp.float32, "b": jnp.float64}
        given = {name: jnp.array([x] * 2, of[name]) for name, x in grads.items()}
        found = helpers.run_ranks(lambda x: clip.update(x, optax.EmptyState())[0], given, 2)
    np.testing.assert_allclose(found["a"][0], [2**-0.5, 0], rtol=1e-6)
    np.testing.assert_allclose(found["b"][0], np.array([1, 2]) / 1e20 / 2**0.5, rtol=1e-6)


@pytest.mark.parametrize("norm", [1e6, 1e-3])
def test_a_clip_has_the_derivative_of_optaxs(norm):
    """One rank's, of numbers of ordinary size, whether they are clipped or not."""
    ours, others = sparsejax.transforms.clip_by_rank(norm), optax.clip_by_global_norm(norm)
    of = lambda tx: lambda x: (tx.update({"w": x}, optax.EmptyState())[0]["w"] ** 2).sum()
    x = helpers.gradients(1, 9, 1.0)
    found = helpers.run_ranks(jax.grad(of(ours)), x, 1)
    np.testing.assert_allclose(found[0], jax.grad(of(others))(x[0]), rtol=1e-4, atol=1e-7)
    assert not helpers.run_ranks(jax.grad(of(ours)), 0 * x, 1).any()


def test_a_guard_after_the_synchronization_is_named():
    tx = optax.chain(sparsejax.zen_sync(), sparsejax.skip_nonfinite(optax.sgd(0.1)))
    params = {"w": jnp.ones(3)}
    step = helpers.shard_map(
        lambda x: tx.update({"w": x}, tx.init(params), params)[0],
        mesh=helpers.mesh_of(2),
        in_specs=P("data"),
        out_specs=P(),
    )
    with pytest.raises(errors.AlreadySummedError, match="skip_nonfinite comes after the"):
        jax.eval_shape(step, jnp.ones(6))
