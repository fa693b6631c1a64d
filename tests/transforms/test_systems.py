"""Ok-Topk, SparDL, gTopk and their yardsticks as optax transformations."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from benchmarks.papers.formulas import cost_tables
from sparsejax import errors, schemes
from sparsejax.state import observing
from sparsejax.transforms import systems
from tests import helpers


RANKS = 4
MAKE = {
    "ok_topk": lambda **more: sparsejax.ok_topk_sync(0.05, threshold_every=4, **more),
    "spardl": lambda **more: sparsejax.spardl_sync(0.05, **more),
    "gtopk": lambda **more: sparsejax.transforms.gtopk_sync(0.05, **more),
    "topk_a": lambda **more: sparsejax.transforms.topk_a_sync(0.05, **more),
    "topk_dsa": lambda **more: sparsejax.transforms.topk_dsa_sync(0.05, **more),
    "gaussian_k": lambda **more: sparsejax.transforms.gaussian_k_sync(0.05, **more),
}
# Each made once for the same options, so that what is compiled serves several tests.
ALL = {name: functools.cache(make) for name, make in MAKE.items()}
CHOOSE_AGAIN = ("ok_topk", "spardl", "gtopk")
# One is large enough to be chosen from, one is not; one is by name a table.
SHAPES = {"embedding": (600, 120), "bias": (100,)}
PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def step(tx, state, ranks=RANKS):
    """Traces a step on so many ranks."""
    specs = sparsejax.state_specs(state)
    mapped = helpers.shard_map(
        lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
        mesh=helpers.mesh_of(ranks),
        in_specs=(P("data"), specs),
        out_specs=(P(), specs),
    )
    grads = jax.tree.map(lambda x: np.zeros((ranks, *x.shape), x.dtype), PARAMS)
    return jax.eval_shape(mapped, grads, state)


def run(tx, steps, dtype=np.float32):
    """Gradients of a few steps, and what is made of them."""
    rng = np.random.default_rng(0)
    draw = lambda shape: rng.standard_t(4, (RANKS, steps, *shape)).astype(dtype)
    grads = {name: draw(shape) for name, shape in SHAPES.items()}
    return grads, helpers.ranks(RANKS)(tx, grads, sparsejax.metrics)


@pytest.mark.slow
def test_metrics_tell_the_bytes_and_the_norm_of_the_residual():
    _, done = run(ALL["ok_topk"](), 12)
    found = {name: x[0, -1] for name, x in done.seen.items()}
    assert found["sync/wire_bytes"] < 0.5 * found["sync/dense_bytes"]
    held = np.asarray(sparsejax.residuals(done.state)["embedding"], float)
    np.testing.assert_allclose(found["sync/residual_norm"], np.linalg.norm(held), 1e-5)


@pytest.mark.slow
def test_topk_a_sends_what_the_papers_say():
    _, done = run(sparsejax.transforms.topk_a_sync(0.05, code="coo32"), 2)
    told = {name: x[0, -1] for name, x in done.seen.items()}
    k = round(0.05 * PARAMS["embedding"].size)
    paper = cost_tables.topk_a(k, RANKS).bytes
    assert told["sync/embedding/payload_bytes"] == paper + 4 * (RANKS - 1)
    assert paper < told["sync/embedding/wire_bytes"] < 1.5 * paper


@pytest.mark.slow
def test_numbers_of_16_bits_are_held_in_32():
    tx = sparsejax.transforms.gtopk_sync(0.05, reduce="sum")
    grads, done = run(sparsejax.accumulate(tx, 3, reduce="sum"), 6, jnp.bfloat16)
    # What is applied is rounded to the gradient's dtype once.
    helpers.assert_conserved(grads, done, 1e-2)
    # Where nothing was applied, nothing was rounded.
    given = grads["embedding"].astype(np.float64).sum((0, 1))
    left = given - helpers.held(done.state)["embedding"]
    left = left[~(done.updates["embedding"][0] != 0).any(0)]
    assert left.size
    assert np.abs(left).max() <= 1e-4
    dense = done.seen["sync/embedding/dense_bytes"][0, -1]
    assert dense == 2 * (RANKS - 1) / RANKS * 2 * PARAMS["embedding"].size
    assert sparsejax.residuals(done.state)["embedding"].dtype == jnp.float32


@pytest.mark.parametrize("name", ["ok_topk", "topk_a"])
def test_a_scheme_and_a_sparsifier_see_a_state_of_other_ranks(name):
    tx = ALL[name]()
    state = sparsejax.init(tx, PARAMS, helpers.mesh_of(RANKS))
    with pytest.raises(errors.StateError, match=r"for 4 ranks, and there are 2: .*resized"):
        step(tx, state, 2)
    # Where the mesh is known, from few ranks to many as well.
    trainer = sparsejax.data_parallel(lambda p, b: 0.0, tx, helpers.mesh_of(RANKS + 1))
    state = trainer.init(PARAMS)._replace(opt_state=state)
    with pytest.raises(errors.StateError, match=r"for 4 ranks, and there are 5: .*resized"):
        trainer.compiled(state)


def test_a_state_is_not_resized_into_another_one():
    tx = ALL["gtopk"]()
    state = sparsejax.init(tx, PARAMS, helpers.mesh_of(RANKS))
    with pytest.raises(errors.StateError, match="different transformations"):
        sparsejax.resized(
            state, sparsejax.init(optax.adam(1.0), PARAMS, helpers.mesh_of(2))
        )
    other = {"embedding": np.zeros((601, 120), np.float32), "bias": PARAMS["bias"]}
    fresh = sparsejax.init(tx, other, helpers.mesh_of(2))
    with pytest.raises(errors.StateError, match="other parameters"):
        sparsejax.resized(state, fresh)


@pytest.mark.parametrize("name", ["spardl", "gaussian_k"])
def test_a_leaf_of_which_nothing_would_be_sent_is_named(name):
    tx = getattr(systems, f"{name}_sync")(1e-6)
    with pytest.raises(errors.ArgumentError, match="'embedding' is less than one element"):
        sparsejax.init(tx, PARAMS, helpers.mesh_of(RANKS))


def test_rows_are_no_unit_of_what_is_chosen_one_by_one():
    tx = sparsejax.spardl_sync(0.05, rules={"embedding": "row"})
    with pytest.raises(
        errors.RuleError, match=r"leaf 'embedding' the unit 'row', and SparDL"
    ):
        sparsejax.init(tx, PARAMS, helpers.mesh_of(RANKS))


@pytest.mark.parametrize("name", ALL)
def test_all_large_leaves_of_one_dtype_are_selected_from_as_one_vector(name):
    """A table among them, where they choose again; else its elements join others."""
    shapes = {"bias": (100,), "embedding": (600, 120), "kernel": (300, 300)}
    params = {k: jax.ShapeDtypeStruct(s, np.float32) for k, s in shapes.items()}
    params["half"] = jax.ShapeDtypeStruct((300, 300), jnp.bfloat16)
    tx = MAKE[name]()
    (exchange,) = observing.observed(tx, params).exchanges
    kinds = {bucket.paths: bucket.shape for bucket in exchange.buckets}
    large = {("embedding",): (120,), ("kernel",): ()}
    if name in CHOOSE_AGAIN:
        large = {("embedding", "kernel"): ()}
    assert kinds == {("bias",): (), **large, ("half",): ()}
    state = sparsejax.init(tx, params, helpers.mesh_of(2))
    assert sparsejax.residuals(state)["half"].dtype == jnp.float32


def test_a_host_does_not_choose_for_its_ranks():
    with pytest.raises(errors.ArgumentError, match="two_level=False"):
        sparsejax.sync(schemes.OkTopk(0.01), ("hosts", "devices"))


def test_a_state_of_another_scheme_is_an_error():
    tx = sparsejax.sync(schemes.Zen())
    state = sparsejax.init(tx, PARAMS, helpers.mesh_of(RANKS))
    own = ALL["gtopk"]()
    with pytest.raises(errors.StateError, match="made for another scheme"):
        step(own, state)
    state = sparsejax.init(own, PARAMS, helpers.mesh_of(RANKS))
    with pytest.raises(errors.StateError, match="by another scheme than SparDL"):
        step(ALL["spardl"](), state)


def test_traced_arguments_are_an_error_that_names_them():
    make = optax.inject_hyperparams(sparsejax.spardl_sync, static_args=("density",))
    with pytest.raises(errors.ArgumentError, match="teams must be a Python value"):
        jax.eval_shape(make(0.05).init, PARAMS)


@pytest.mark.filterwarnings("ignore:the updates of all leaves are")
@pytest.mark.parametrize("name", ["ok_topk_sync", "topk_a_sync", "dgc"])
def test_with_all_arguments_static_they_can_be_injected_around(name):
    make = getattr(systems if name.endswith("_sync") else sparsejax, name)
    named = tuple(inspect.signature(make).parameters)
    tx = optax.inject_hyperparams(make, static_args=named)(0.05)
    state = sparsejax.init(tx, PARAMS, helpers.mesh_of(RANKS))
    assert set(sparsejax.residuals(state)) == set(PARAMS)


@pytest.mark.slow
def test_a_second_axis_may_shard_what_is_chosen_from():
    mesh = helpers.grid(data=4, model=2)
    options = {"rules": {"": "sparse"}, "reduce": "sum", "teams": 2, "between": "gather"}
    tx = sparsejax.spardl_sync(0.05, "data", **options)
    params = {"w": np.zeros((1000, 6), np.float32)}
    where = {"w": P(None, "model")}
    state = sparsejax.init(tx, params, mesh, "data", param_specs=where)
    specs = sparsejax.state_specs(state, params, where)
    step = helpers.shard_map(
        lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
        mesh=mesh,
        in_specs=({"w": P("data", None, "model")}, specs),
        out_specs=(where, specs),
    )
    step = jax.jit(step)
    rng = np.random.default_rng(0)
    total = np.zeros((1000, 6))
    for _ in range(6):
        g = rng.standard_t(4, (4, 1000, 6)).astype(np.float32)
        g[:, :, :3] *= rng.random(3) < 0.5  # one shard is much emptier
        updates, state = step({"w": g}, state)
        total += g.sum(0, dtype=np.float64) - np.asarray(updates["w"], np.float64)
    left = np.asarray(sparsejax.residuals(state)["w"], np.float64).sum(0)
    np.testing.assert_allclose(left, total, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_teams_are_timed_by_running_them():
    times = sparsejax.advise.measure_teams(PARAMS, 0.05, helpers.mesh_of(2), steps=2)
    assert set(times) == {1, 2}
    assert all(0 < seconds < 60 for seconds in times.values())


def test_what_is_measured_is_not_given():
    with pytest.raises(errors.ArgumentError, match="teams is what is measured"):
        sparsejax.advise.measure_teams(PARAMS, 0.05, helpers.mesh_of(4), teams=2)
    with pytest.raises(errors.ArgumentError, match="no parameter is large enough"):
        sparsejax.advise.measure_teams({"b": np.zeros(100)}, 0.05, helpers.mesh_of(2))
    with pytest.raises(errors.ArgumentError, match="steps must be"):
        sparsejax.advise.measure_teams(PARAMS, 0.05, helpers.mesh_of(4), steps=0)
