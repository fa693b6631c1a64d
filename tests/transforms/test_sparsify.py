"""Sparsifiers as transformations: memories, leaves, chains, meshes, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import schemes, sparsifiers
from sparsejax.errors import ArgumentError, StateError
from tests import helpers


N, SIZE = 3, 3001
SMALL = {"min_size": 1}


def sync(**options):
    """All entries to all: what compiles fastest."""
    options = {"reduce": "sum", "rules": {"": "sparse"}, **options}
    return sparsejax.sync(schemes.AGSparse(), **options)


def run(tx, grads):
    """From gradients {name: [n, steps, ...]} to the updates by step, and what waits."""
    done = helpers.ranks(len(jax.tree.leaves(grads)[0]))(tx, grads)
    return done.updates, jax.tree.map(lambda x: x[:, 0], sparsejax.residuals(done.state))


def random(steps=4, shape=(SIZE,), seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((N, steps, *shape)).astype(np.float32)


def conserved(grads, updates, held, velocity=None):
    for name, x in grads.items():
        came = (x if velocity is None else velocity[name]).astype(np.float64)
        went = updates[name][0].astype(np.float64).sum(0)
        waits = held[name].astype(np.float64).sum(0)
        error = np.abs(came.sum((0, 1)) - went - waits)
        assert (error <= 2e-6 * np.abs(came).sum((0, 1)) + 1e-30).all(), name


# --- Memories.


@pytest.mark.slow
def test_momentum_correction_sends_the_velocity_that_gathers():
    """Without masking: the sum of the velocities is what went and what waits."""
    memory = sparsejax.MomentumCorrection(0.9, nesterov=True, masking=False)
    tx = optax.chain(sparsejax.top_k(0.05, memory=memory, **SMALL), sync())
    grads = {"w": random()}
    updates, held = run(tx, grads)
    velocity, u = [], 0
    for g in grads["w"].astype(np.float64).swapaxes(0, 1):
        u = 0.9 * (u + g)
        velocity.append(u + g)
    conserved(grads, updates, held, {"w": np.stack(velocity, 1)})


def test_without_a_memory_what_does_not_go_is_lost_and_there_is_no_state():
    tx = optax.chain(sparsejax.top_k(0.05, memory=None, **SMALL), sync())
    state = tx.init({"w": jnp.zeros(SIZE)})  # anywhere: nothing differs by rank
    assert state[0].residual is None
    with pytest.raises(StateError, match="with memory=None what a sparsifier leaves out"):
        sparsejax.residuals(state)
    small = sparsejax.spardl_sync(0.05).init({"w": jnp.zeros(SIZE)})
    with pytest.raises(StateError, match=r"each is sent whole\. .* below 65,536 elements"):
        sparsejax.residuals(small)
    with pytest.raises(StateError, match="nothing with a memory has its state"):
        sparsejax.residuals(optax.sgd(0.1).init({"w": jnp.zeros(SIZE)}))


@pytest.mark.slow
def test_clipping_is_by_rank_and_scaled_by_the_number_of_ranks():
    """Gradients of norm 1000 from each of 3 ranks, clipped at 6: 6 / sqrt(3) of each."""
    tx = optax.chain(sparsejax.top_k(1.0, clip_norm=6.0, **SMALL), sync())
    grads = {"w": random(1)}
    grads["w"] *= 1000 / np.linalg.norm(grads["w"], axis=2, keepdims=True)
    updates, _ = run(tx, grads)
    want = (grads["w"] * (6 / np.sqrt(3) / 1000)).sum((0, 1))
    np.testing.assert_allclose(updates["w"][0, 0], want, rtol=1e-4, atol=1e-6)


# --- Leaves.


@pytest.mark.slow
def test_small_leaves_and_those_not_to_be_compressed_go_whole():
    grads = {"big": random(), "kept": random(seed=1), "bias": random(shape=(7,), seed=2)}
    compress = lambda path, leaf: path != "kept"
    tx = optax.chain(sparsejax.top_k(0.01, min_size=100, compress=compress), sync())
    updates, held = run(tx, grads)
    conserved(grads, updates, held)
    for name in ("kept", "bias"):
        np.testing.assert_allclose(
            updates[name][0], grads[name].sum(0), rtol=1e-5, atol=1e-5
        )
        assert not held[name].any()
    assert held["big"].any()
    assert jax.tree.map(np.shape, held) == {k: (N, *x.shape[2:]) for k, x in grads.items()}


@pytest.mark.parametrize("make", [sparsejax.top_k, sparsejax.dgc])
def test_leaves_of_fewer_than_65_536_elements_go_whole_by_default(make):
    tx = make(0.01)

    def kinds(x):
        grads = {"large": x[:65_536], "shorter": x[1:]}
        updates, _ = tx.update(grads, tx.init(helpers.parameters(grads)))
        assert isinstance(updates["large"], sparsejax.SparseTensor)
        return updates["shorter"]

    like = jax.ShapeDtypeStruct((N, 65_536), jnp.float32)
    whole = jax.eval_shape(helpers.stacked(kinds, N), like)
    assert whole.shape == (N, 65_535)


@pytest.mark.slow
def test_one_threshold_for_all_leaves():
    """The small leaf's numbers are a hundredth as large, so it sends nothing of its own."""
    grads = {"large": random(1), "small": random(1, (40, 50), seed=1) / 100}
    tx = optax.chain(sparsejax.top_k(0.02, global_=True, **SMALL), sync())
    updates, held = run(tx, grads)
    conserved(grads, updates, held)
    together = np.abs(np.concatenate([x[0, 0].reshape(-1) for x in grads.values()]))
    sent = int(np.ceil(0.02 * together.size))
    for rank in range(N):
        whole = [grads[k][rank, 0].reshape(-1) for k in ("large", "small")]
        least = np.sort(np.abs(np.concatenate(whole)))[-sent]
        for x, name in zip(whole, ("large", "small"), strict=True):
            went = held[name][rank].reshape(-1) != x
            np.testing.assert_array_equal(went, np.abs(x) >= least)
    assert not updates["small"].any()


# --- Chains.


@pytest.mark.slow
def test_steps_are_accumulated_before_it_is_sparsified():
    """What is selected is of the sum of two steps; in between nothing moves."""
    grads = {"w": random()}
    own = sparsejax.top_k(0.05, **SMALL)
    updates, held = run(
        sparsejax.accumulate(optax.chain(own, sync()), 2, reduce="sum"), grads
    )
    assert not updates["w"][0, ::2].any()
    pairs = {"w": grads["w"].reshape(N, 2, 2, SIZE).sum(2)}
    again, waits = run(optax.chain(own, sync()), pairs)
    np.testing.assert_allclose(updates["w"][0, 1::2], again["w"][0], rtol=1e-6)
    np.testing.assert_allclose(held["w"], waits["w"], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_the_state_keeps_its_shape_and_specs_tell_what_differs_by_rank():
    params = {"w": jnp.zeros(SIZE), "b": jnp.zeros(3)}
    tx = optax.chain(
        sparsejax.sparsify(
            sparsifiers.ReuseThreshold(0.05), memory=sparsejax.MomentumCorrection(), **SMALL
        ),
        sync(),
        optax.adam(1e-3),
    )
    mesh = helpers.mesh_of(N)
    state = sparsejax.init(tx, params, mesh)
    specs = sparsejax.state_specs(state)
    own = specs[0]
    assert own.step == P()
    for tree in (own.residual, own.momentum, own.inner.sparsifiers["w"]):
        assert set(jax.tree.leaves(tree.value)) == {P(helpers.AXIS)}
    assert own.residual.ranks == own.momentum.ranks == own.norm == P()
    assert jax.tree.map(np.shape, sparsejax.residuals(state)) == {
        "w": (N, SIZE),
        "b": (N, 3),
    }

    def on_rank(grads, state):
        return tx.update(jax.tree.map(lambda x: x[0], grads), state, params)

    step = jax.jit(
        helpers.shard_map(
            on_rank, mesh=mesh, in_specs=(P(helpers.AXIS), specs), out_specs=(P(), specs)
        )
    )
    grads = {"w": random(1)[:, 0], "b": np.ones((N, 3), np.float32)}
    updates, after = step(grads, state)
    like = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    assert like(after) == like(state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    metrics = sparsejax.metrics(after)
    held = [np.asarray(x) for x in jax.tree.leaves(sparsejax.residuals(after))]
    norm = np.sqrt(sum((x**2).sum() for x in held))
    assert metrics["sparsify/residual_norm"] == pytest.approx(norm)
    assert updates["w"].shape == (SIZE,)


# --- Meshes.

# By an exact threshold, from a sample, and from moments.
SHARING = (sparsifiers.TopK, sparsifiers.DGC, sparsifiers.GaussianK)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARING)
def test_shards_of_a_tensor_share_a_threshold(kind):
    """One shard is ten times as large: it sends nearly all that goes."""
    data, model, width = 2, 4, 2048
    mesh = helpers.grid(data=data, model=model)
    rng = np.random.default_rng(0)
    grads = rng.standard_normal((data, 8, model * width)).astype(np.float32)
    grads[:, :, :width] *= 10
    axes = {"axis_name": "data", "model_axis": "model"}
    own = sparsejax.sparsify(kind(0.05), **axes, **SMALL)
    tx = optax.chain(own, sync(axis_name="data"))

    def step(grad):
        state = tx.init(helpers.parameters({"w": grad[0]}))
        update, state = tx.update({"w": grad[0]}, state)
        return update["w"], sparsejax.residuals(state)["w"]

    run = helpers.shard_map(
        step,
        mesh=mesh,
        in_specs=P("data", None, "model"),
        out_specs=(P(None, "model"), P("data", None, "model")),
    )
    update, held = jax.jit(run)(grads)
    np.testing.assert_allclose(update + held.sum(0), grads.sum(0), rtol=1e-5, atol=1e-5)
    went = np.asarray(held != grads).reshape(data, 8, model, width).sum((1, 3))
    assert (went[:, 1:].sum(1) < 0.02 * went[:, 0]).all()
    # What one shard may send is limited by its own room; the rest waits.
    assert (went[:, 0] >= 0.05 * 8 * width * 0.6).all()


@pytest.mark.slow
def test_a_number_too_large_for_its_dtype_goes_in_parts():
    """What waits grows beyond what 16 bits hold: as much as they hold goes at a time."""
    grads = {"w": np.full((1, 3, SIZE), 60000, np.float16)}
    updates, held = run(optax.chain(sparsejax.top_k(0.1, **SMALL), sync()), grads)
    assert np.isfinite(updates["w"]).all()
    assert (updates["w"] == np.finfo(np.float16).max).any()
    conserved(grads, updates, held)


@pytest.mark.slow
def test_momentum_that_is_not_finite_is_forgotten():
    memory = sparsejax.MomentumCorrection(0.9, masking=False)
    grads = {"w": random(3), "bias": random(3, (5,), seed=1)}
    grads["w"][1, 0, 17] = grads["bias"][1, 0, 2] = np.nan
    own = sparsejax.top_k(0.05, memory=memory, min_size=100)
    updates, _ = run(optax.chain(own, sync()), grads)
    for name in grads:
        assert np.isfinite(updates[name][0, 1:]).all()


@pytest.mark.slow
def test_ids_of_a_batch_do_not_drop_what_waited_from_others():
    """Rows 0 to 4 have a gradient first, and still wait when rows 5 to 9 are named."""
    rows, width = 10, 8
    tx = optax.chain(
        sparsejax.top_k(0.1, **SMALL), sync(rules={"": "sparse", "emb": "row"})
    )
    params = {"embedding": jnp.zeros((rows, width))}
    grads = np.zeros((N, 2, rows, width), np.float32)
    rng = np.random.default_rng(0)
    grads[:, 0, :5] = rng.standard_normal((N, 5, width))
    grads[:, 1, 5:] = rng.standard_normal((N, 5, width)) / 100

    def on_rank(grads):
        state, updates = tx.init(params), []
        for step in range(2):
            ids = {"embedding": jnp.arange(5) + 5 * step}
            update, state = tx.update({"embedding": grads[step]}, state, params, ids=ids)
            updates.append(update["embedding"])
        return jnp.stack(updates), sparsejax.residuals(state)["embedding"][0]

    updates, held = helpers.run_ranks(on_rank, grads, N)
    conserved({"w": grads}, {"w": updates}, {"w": held})


# --- Bad input.


def test_a_traced_density_is_told_to_be_static():
    made = optax.inject_hyperparams(sparsejax.dgc)
    with pytest.raises(ArgumentError, match=r"static_args=\('density',\)"):
        made(density=0.01).init({"w": jnp.zeros(SIZE)})
    with pytest.raises(ArgumentError, match="made for its largest value"):
        sparsejax.dgc(optax.linear_schedule(0.1, 0.01, 100))


TOP_K = sparsejax.top_k(0.1, **SMALL)


@pytest.mark.parametrize(
    ("chain", "match"),
    [
        ((TOP_K, TOP_K), "two sparsifiers in one chain"),
        ((sparsejax.top_k(0.1, model_axis=helpers.AXIS),), "is the axis of the ranks"),
    ],
)
def test_chains_that_do_not_fit_are_refused(chain, match):
    with pytest.raises(ArgumentError, match=match):
        run(optax.chain(*chain, sync()), {"w": random(1)})


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: sparsejax.top_k(1.5), "density must"),
        (lambda: sparsejax.sparsify(0.01), "must be one of sparsejax.sparsifiers"),
        (lambda: sparsejax.top_k(0.01, memory="residual"), "memory must be"),
        (lambda: sparsejax.sparsify(sparsifiers.RandomK(0.01), global_=True), "has none"),
        (lambda: sparsejax.top_k(0.01, clip_norm=0), "clip_norm must be above 0"),
        (lambda: sparsejax.top_k(0.01, min_size=-1), "min_size must be an int"),
        (
            lambda: sparsejax.sparsify(sparsifiers.Threshold(0.01, 0)),
            "value must be above 0",
        ),
        (
            lambda: sparsejax.sparsify(sparsifiers.Dragonn(0.01, tables=1.5)),
            "tables must be a positive int",
        ),
        (lambda: sparsejax.MomentumCorrection(1.0), r"momentum must lie in \[0, 1\)"),
        (
            lambda: sync(sparsifier=sparsejax.dgc(0.01)),
            r"no sparsifier=dgc\(density=0.01\): put the sparsifier in front of sync",
        ),
        (lambda: sparsifiers.Warmup(0.01, 0), "steps must be a positive int"),
    ],
)
def test_errors_name_what_to_do(make, match):
    with pytest.raises(ArgumentError, match=match):
        make()
