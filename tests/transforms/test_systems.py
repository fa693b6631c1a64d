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
from sparsejax.state.per_rank import find
from sparsejax.transforms import systems
from sparsejax.transforms.wrappers import AccumulateState
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


_STEPS = {}


def stepper(tx, state, ranks=RANKS):
    """From gradients [ranks, ...] and a state to updates and the next state."""
    key = tx, ranks, jax.tree.structure(state)
    if key in _STEPS:
        return _STEPS[key]
    specs = sparsejax.state_specs(state)
    step = helpers.shard_map(
        lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
        mesh=helpers.mesh_of(ranks),
        in_specs=(P("data"), specs),
        out_specs=(P(), specs),
    )
    _STEPS[key] = jax.jit(step, donate_argnums=1)
    return _STEPS[key]


def gradients(step, ranks=RANKS, dtype=np.float32):
    rng = np.random.default_rng(step)
    draw = lambda shape: rng.standard_t(4, (ranks, *shape)).astype(dtype)
    return {name: draw(shape) for name, shape in SHAPES.items()}


def held(state):
    """What all ranks hold, added up: zeros where nothing is ever held."""
    masked = lambda x: isinstance(x, optax.MaskedNode)
    add_up = lambda x, like: (
        np.zeros(like.shape) if masked(x) else np.asarray(x, float).sum(0)
    )
    total = jax.tree.map(add_up, sparsejax.residuals(state), PARAMS, is_leaf=masked)
    for node in find(state, AccumulateState):
        pending = jax.tree.map(lambda x: np.asarray(x, float).sum(0), node.pending.value)
        total = jax.tree.map(np.add, total, pending)
    return total


def run(tx, steps, state=None, first=0, dtype=np.float32, touched=None):
    """The sums of what was given and applied, and the state behind.

    Where something was ever applied is noted in `touched`, arrays of flags.
    """
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    if state is None:
        state = sparsejax.init(tx, params, helpers.mesh_of(RANKS))
    step = stepper(tx, state)
    given, applied = (jax.tree.map(lambda x: x * 0.0, PARAMS) for _ in range(2))
    for number in range(first, first + steps):
        grads = gradients(number, dtype=dtype)
        updates, state = step(grads, state)
        add = lambda total, x: total + np.asarray(x, np.float64)
        given = jax.tree.map(
            lambda total, x: total + np.sum(x, 0, np.float64), given, grads
        )
        applied = jax.tree.map(add, applied, updates)
        for name in touched or ():
            touched[name] |= np.asarray(updates[name]) != 0
    return given, applied, state


@pytest.mark.slow
def test_metrics_tell_the_bytes_and_the_norm_of_the_residual():
    _, _, state = run(ALL["ok_topk"](), 12)
    found = sparsejax.metrics(state)
    assert found["sync/wire_bytes"] < 0.5 * found["sync/dense_bytes"]
    squares = np.square(np.asarray(sparsejax.residuals(state)["embedding"], float))
    np.testing.assert_allclose(found["sync/residual_norm"], np.sqrt(squares.sum()), 1e-5)


@pytest.mark.slow
def test_a_state_goes_through_a_checkpoint():
    tx = ALL["ok_topk"]()
    _, _, state = run(tx, 3)
    saved = jax.tree.map(np.asarray, state)
    _, after, _ = run(tx, 3, state, first=3)
    fresh = sparsejax.init(tx, PARAMS, helpers.mesh_of(RANKS))
    restored = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), saved, fresh)
    _, again, _ = run(tx, 3, restored, first=3)
    jax.tree.map(np.testing.assert_array_equal, after, again)


@pytest.mark.slow
def test_a_state_of_other_ranks_is_an_error_that_says_how_to_go_on():
    tx = ALL["ok_topk"]()
    _, _, state = run(tx, 2)
    with pytest.raises(errors.StateError, match=r"for 4 ranks, and there are 2: .*resized"):
        stepper(tx, state, 2)(gradients(2, 2), jax.tree.map(np.asarray, state))
    fresh = sparsejax.init(tx, PARAMS, helpers.mesh_of(2))
    before = held(state)
    moved = sparsejax.resized(jax.tree.map(np.asarray, state), fresh)
    # Half as many ranks have half as much, of a mean that weighs each twice.
    close = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(held(moved)["embedding"], before["embedding"] / 2, **close)
    with pytest.raises(errors.ArgumentError, match=r"reduce='sum' .* has reduce='mean'"):
        sparsejax.resized(jax.tree.map(np.asarray, state), fresh, reduce="sum")
    updates, _ = stepper(tx, moved, 2)(gradients(2, 2), moved)
    assert np.isfinite(updates["embedding"]).all()


@pytest.mark.parametrize("name", helpers.mostly_slow(ALL, "ok_topk", "topk_a"))
def test_every_one_sees_a_state_of_other_ranks(name):
    tx = ALL[name]()
    state = sparsejax.init(tx, PARAMS, helpers.mesh_of(RANKS))
    with pytest.raises(errors.StateError, match=r"for 4 ranks, and there are 2: .*resized"):
        jax.eval_shape(stepper(tx, state, 2), gradients(0, 2), state)
    # Where the mesh is known, from few ranks to many as well.
    trainer = sparsejax.data_parallel(lambda p, b: 0.0, tx, helpers.mesh_of(RANKS + 1))
    state = trainer.init(PARAMS)._replace(opt_state=state)
    with pytest.raises(errors.StateError, match=r"for 4 ranks, and there are 5: .*resized"):
        trainer.compiled(state)


@pytest.mark.filterwarnings("ignore:the updates of all leaves are")
def test_a_sparsifier_sees_a_state_of_other_ranks():
    tx = sparsejax.top_k(0.05)
    state = sparsejax.init(tx, PARAMS, helpers.mesh_of(RANKS))
    with pytest.raises(errors.StateError, match=r"for 4 ranks, and there are 2: .*resized"):
        jax.eval_shape(stepper(tx, state, 2), gradients(0, 2), state)


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


@pytest.mark.slow
def test_numbers_of_16_bits_are_held_in_32():
    tx = sparsejax.transforms.gtopk_sync(0.05, reduce="sum")
    tx = sparsejax.accumulate(tx, 3, reduce="sum")
    touched = {"embedding": np.zeros(SHAPES["embedding"], bool)}
    given, applied, state = run(tx, 6, dtype=jnp.bfloat16, touched=touched)
    # Where nothing was applied, nothing was rounded.
    left = (given["embedding"] - held(state)["embedding"])[~touched["embedding"]]
    assert left.size
    assert np.abs(left).max() <= 1e-4
    dense = sparsejax.metrics(state)["sync/embedding/dense_bytes"]
    assert dense == 2 * (RANKS - 1) / RANKS * 2 * PARAMS["embedding"].size
    assert sparsejax.residuals(state)["embedding"].dtype == jnp.float32
    # What is applied is rounded to the gradient's dtype once.
    scale = np.abs(applied["embedding"]) + 1
    error = np.abs(given["embedding"] - applied["embedding"] - held(state)["embedding"])
    assert (error <= 6 * 2**-8 * 16 * scale).all()


@pytest.mark.parametrize("name", ALL)
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


def test_two_that_choose_are_one_too_many():
    tx = optax.chain(sparsejax.top_k(0.05), sparsejax.transforms.gtopk_sync(0.05))
    with pytest.raises(errors.ArgumentError, match="'embedding' is sparse already"):
        sparsejax.init(tx, PARAMS, helpers.mesh_of(RANKS))


def test_a_host_does_not_choose_for_its_ranks():
    with pytest.raises(errors.ArgumentError, match="two_level=False"):
        sparsejax.sync(schemes.OkTopk(0.01), ("hosts", "devices"))


def test_a_state_of_another_scheme_is_an_error():
    tx = sparsejax.sync(schemes.Zen())
    state = sparsejax.init(tx, PARAMS, helpers.mesh_of(RANKS))
    own = ALL["gtopk"]()
    with pytest.raises(errors.StateError, match="made for another scheme"):
        stepper(own, state)(gradients(0), state)
    state = sparsejax.init(own, PARAMS, helpers.mesh_of(RANKS))
    with pytest.raises(errors.StateError, match="by another scheme than SparDL"):
        stepper(ALL["spardl"](), state)(gradients(0), state)


def test_a_state_passed_to_all_ranks_is_an_error_that_names_the_specs():
    tx = ALL["gtopk"]()
    state = sparsejax.init(tx, PARAMS, helpers.mesh_of(RANKS))
    step = helpers.shard_map(
        lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
        mesh=helpers.mesh_of(RANKS),
        in_specs=(P("data"), P()),
        out_specs=P(),
    )
    with pytest.raises(errors.StateError, match=r"sparsejax.state_specs\(state\)"):
        jax.eval_shape(step, gradients(0), state)


def test_traced_arguments_are_an_error_that_names_them():
    make = optax.inject_hyperparams(sparsejax.spardl_sync, static_args=("density",))
    with pytest.raises(errors.ArgumentError, match="teams must be a Python value"):
        jax.eval_shape(make(0.05).init, PARAMS)


@pytest.mark.filterwarnings("ignore:the updates of all leaves are")
@pytest.mark.parametrize("name", [f"{name}_sync" for name in ALL] + ["dgc", "top_k"])
def test_with_all_arguments_static_they_can_be_injected_around(name):
    make = getattr(systems if name.endswith("_sync") else sparsejax, name)
    named = tuple(inspect.signature(make).parameters)
    tx = optax.inject_hyperparams(make, static_args=named)(0.05)
    state = sparsejax.init(tx, PARAMS, helpers.mesh_of(RANKS))
    assert set(sparsejax.residuals(state)) == set(PARAMS)


@pytest.mark.slow
def test_two_axes_may_be_the_ranks():
    mesh = helpers.grid(hosts=2, devices=2)
    names = mesh.axis_names
    pair, one = MAKE["ok_topk"](axis_name=names), ALL["ok_topk"]()
    state = sparsejax.init(pair, PARAMS, mesh, names)
    specs = sparsejax.state_specs(state)
    step = helpers.shard_map(
        lambda g, s: pair.update(jax.tree.map(lambda x: x[0], g), s),
        mesh=mesh,
        in_specs=(P(names), specs),
        out_specs=(P(), specs),
    )
    updates, _ = jax.jit(step)(gradients(0), state)
    state = sparsejax.init(one, PARAMS, helpers.mesh_of(4))
    want, _ = stepper(one, state)(gradients(0), state)
    jax.tree.map(np.testing.assert_array_equal, updates, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "check_vma"),
    [
        *(("spardl in teams", True), ("ok_topk", False)),
    ],
)
def test_a_second_axis_may_shard_what_is_chosen_from(name, check_vma):
    mesh = helpers.grid(data=4, model=2)
    make = getattr(systems, f"{name.split()[0]}_sync")
    more = {"teams": 2, "between": "gather"} if name.endswith("teams") else {}
    tx = make(0.05, "data", rules={"": "sparse"}, reduce="sum", **more)
    params = {"w": np.zeros((1000, 6), np.float32)}
    where = {"w": P(None, "model")}
    state = sparsejax.init(tx, params, mesh, "data", param_specs=where, check_vma=check_vma)
    specs = sparsejax.state_specs(state, params, where)
    step = helpers.shard_map(
        lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
        mesh=mesh,
        in_specs=({"w": P("data", None, "model")}, specs),
        out_specs=(where, specs),
        check_vma=check_vma,
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


@pytest.mark.slow
def test_topk_a_sends_what_the_papers_say():
    tx = sparsejax.transforms.topk_a_sync(0.05, code="coo32")
    _, _, state = run(tx, 2)
    told = sparsejax.metrics(state)
    k = round(0.05 * PARAMS["embedding"].size)
    paper = cost_tables.topk_a(k, RANKS).bytes
    assert told["sync/embedding/payload_bytes"] == paper + 4 * (RANKS - 1)
    assert paper < told["sync/embedding/wire_bytes"] < 1.5 * paper


def test_explain_says_what_they_send():
    told = sparsejax.explain(
        ALL["spardl"](), PARAMS, ranks=14, network=sparsejax.Network(25, 20)
    )
    leaf = told.row("embedding")
    assert leaf.scheme == "SparDL"
    assert leaf.sent_bytes < 0.15 * leaf.dense_bytes
