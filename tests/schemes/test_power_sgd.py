"""PowerSGD against its formula in NumPy's float64; conservation is in `tests/laws`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import schemes
from sparsejax.errors import ArgumentError, RuleError
from sparsejax.schemes.baselines.power_sgd import as_matrix
from sparsejax.state.per_rank import find
from sparsejax.transforms.exchange import ExchangeState
from tests import helpers


N, STEPS, RANK = 4, 6, 2
SHAPES = {"kernel": (48, 40), "conv": (3, 4, 4, 40), "other": (48, 40), "bias": (40,)}
MATRICES = ("kernel", "conv", "other")


def sync(rank=RANK, **options):
    rules = {"kernel|conv|other": "sparse"}
    return sparsejax.sync(schemes.PowerSGD(rank), reduce="sum", rules=rules, **options)


def gradients(seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal((N, STEPS, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def watched(state):
    """What the tests look at: residuals, the scheme's states, and metrics."""
    inner = find(state, ExchangeState)[0].schemes
    return sparsejax.residuals(state), inner, sparsejax.metrics(state)


@functools.cache
def program():
    tx, params = sync(), {name: jnp.zeros(shape) for name, shape in SHAPES.items()}

    def on_rank(grads):
        def step(state, now):
            updates, state = tx.update(now, state)
            return state, (updates, watched(state))

        state, (updates, seen) = jax.lax.scan(step, tx.init(params), grads)
        return helpers.Run(updates, state, seen)

    return helpers.ranked(on_rank, N)


def test_the_formula():
    """Totals, residuals and the warm start of every step, each matrix by itself."""
    grads = gradients()
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    state = sparsejax.init(sync(), params, helpers.mesh_of(N))
    first = find(state, ExchangeState)[0].schemes
    run = program()(grads)
    helpers.assert_same_on_all_ranks(run.updates)
    residuals, inner, _ = run.seen
    buckets = {"kernel": ("kernel and 1 more", 0), "other": ("kernel and 1 more", 1)}
    for name in MATRICES:
        bucket, place = buckets.get(name, ("conv", 0))
        helpers.assert_same_on_all_ranks(inner[bucket].value.right)
        right = np.asarray(first[bucket].value.right)[0, place].astype(np.float64)
        n, m = as_matrix(SHAPES[name])
        held = np.zeros((N, n, m))
        for step in range(STEPS):
            own = held + grads[name][:, step].reshape(N, n, m).astype(np.float64)
            basis = np.linalg.qr(own.sum(0) @ right)[0]
            total = basis @ basis.T @ own.sum(0)
            held = own - basis @ (basis.T @ own)
            got = run.updates[name][0, step].reshape(n, m)
            np.testing.assert_allclose(got, total, rtol=1e-3, atol=1e-3)
            got = residuals[name][:, step].reshape(N, n, m)
            np.testing.assert_allclose(got, held, rtol=1e-3, atol=1e-3)
            right = own.sum(0).T @ basis
            right /= np.linalg.norm(right, axis=0)
            # The signs of a basis are free.
            got = inner[bucket].value.right[0, step, 0, place]
            signs = np.sign((got * right).sum(0))
            np.testing.assert_allclose(got, signs * right, rtol=1e-3, atol=1e-3)
    exact = grads["bias"].astype(np.float64).sum(0)
    np.testing.assert_allclose(run.updates["bias"][0], exact, rtol=1e-5, atol=1e-5)


def test_bytes_are_those_of_two_thin_matrices():
    run = program()(gradients())
    metrics = {name: x[0, -1] for name, x in run.seen[2].items()}
    share = 2 * (N - 1) / N * 4
    assert metrics["sync/kernel and 1 more/wire_bytes"] == share * 2 * RANK * (48 + 40)
    assert metrics["sync/conv/wire_bytes"] == share * RANK * (48 + 40)
    assert metrics["sync/conv/dense_bytes"] == share * 48 * 40
    assert metrics["sync/conv/rounds"] == 2


def test_what_no_direction_has_met_is_met_later():
    """Zeros first, then rows and columns that had none: directions of nothing stay."""
    grads = gradients()
    for x in grads.values():
        x[:, :3] = 0
        x[:, :, :45] = 0
    run = program()(grads)
    assert not run.updates["kernel"][0, :3].any()
    for step in range(3, STEPS):
        assert np.linalg.norm(run.updates["kernel"][0, step]) > 1


def test_a_number_that_is_not_finite_spoils_one_matrix_and_one_step():
    grads = gradients()
    grads["kernel"][2, 1, 3, 5] = np.nan
    grads["conv"][1, 1, 0, 0, 0, 0] = np.inf
    run = program()(grads)
    updates, residuals = run.updates, run.seen[0]
    for name in ("kernel", "conv"):
        assert np.isnan(updates[name][:, 1]).all()
        assert not residuals[name][:, 1].any()
    clean = program()(gradients()).updates
    np.testing.assert_array_equal(updates["other"], clean["other"])
    np.testing.assert_array_equal(updates["kernel"][:, 0], clean["kernel"][:, 0])
    for name in MATRICES:
        assert np.isfinite(updates[name][:, 2:]).all()
        assert updates[name][:, 2:].any()


def test_other_numbers_of_ranks_go_on_with_what_was_held():
    params = {"w": jnp.zeros((48, 40))}
    tx = sparsejax.sync(schemes.PowerSGD(RANK), rules={"w": "sparse"})
    old, new = (sparsejax.init(tx, params, helpers.mesh_of(n)) for n in (4, 2))
    drawn = np.random.default_rng(0).standard_normal((4, 48, 40)).astype(np.float32)
    old = old._replace(residual=old.residual.with_value({"w": drawn}))
    moved = sparsejax.resized(old, like=new)
    share = lambda state: sparsejax.residuals(state)["w"].mean(0)
    np.testing.assert_allclose(share(moved), share(old), rtol=1e-5, atol=1e-6)
    right = lambda state: np.asarray(state.inner.schemes["w"].value.right)
    assert right(moved).tobytes() == right(old)[:2].tobytes()


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((48, 40), (48, 40)),
        ((3, 3, 64, 128), (576, 128)),
        ((512, 8, 64), (512, 512)),
        ((7,), (1, 7)),
        ((), (1, 1)),
    ],
)
def test_leaves_of_several_axes_are_cut_where_they_are_squarest(shape, matrix):
    assert sorted(as_matrix(shape)) == sorted(matrix)


def test_leaves_that_would_not_be_half_as_large_are_summed_densely():
    params = {
        "large": jax.ShapeDtypeStruct((512, 512), jnp.float32),
        "long": jax.ShapeDtypeStruct((1 << 17,), jnp.float32),
        "narrow": jax.ShapeDtypeStruct((1 << 14, 8), jnp.float32),
    }
    tx = sparsejax.transforms.power_sgd_sync(rank=4)
    state = jax.eval_shape(lambda p: sparsejax.init(tx, p, helpers.mesh_of(2)), params)
    kept = sparsejax.residuals(state)
    assert kept["large"].shape == (2, 512, 512)
    assert isinstance(kept["long"], optax.MaskedNode)
    assert isinstance(kept["narrow"], optax.MaskedNode)


# --- Bad input.


@pytest.mark.parametrize("rank", [0, "4"])
def test_the_rank_is_a_whole_number(rank):
    with pytest.raises(ArgumentError, match="rank"):
        sparsejax.transforms.power_sgd_sync(rank)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"b": schemes.PowerSGD(2)}, r"'b', of shape \[40\].*dense"),
        ({"w": "sparse", "b": "sparse"}, r"'b', of shape \[40\].*dense"),
        ({"w": schemes.PowerSGD(30)}, r"'w', of shape \[48, 40\].*rank=30.*dense"),
        ({"w": "row"}, "'w' the unit 'row', .*PowerSGD has the unit 'leaf'"),
    ],
)
def test_rules_that_ask_for_too_much(rules, words):
    params = {"w": jnp.zeros((48, 40)), "b": jnp.zeros(40)}
    if rules == {"w": "row"}:
        params["w"] = jnp.zeros((512, 512))
    tx = sparsejax.sync(schemes.PowerSGD(2), rules=rules)
    with pytest.raises(RuleError, match=words):
        sparsejax.init(tx, params, helpers.mesh_of(2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"wire_dtype": jnp.bfloat16}, "PowerSGD has no wire_dtype"),
        ({"memory": sparsejax.MomentumCorrection(0.9)}, r"PowerSGD.*masking=False"),
        ({"axis_name": ("hosts", "devices")}, "PowerSGD .* two_level=False"),
    ],
)
def test_what_does_not_go_together(options, words):
    with pytest.raises(ArgumentError, match=words):
        sparsejax.sync(schemes.PowerSGD(), **options)


def test_momentum_that_is_not_masked_and_the_rows_of_ids():
    memory = sparsejax.MomentumCorrection(0.9, masking=False)
    tx = sparsejax.sync(schemes.PowerSGD(2), rules={"w": "sparse"}, memory=memory)
    grads = {"w": np.ones((2, 48, 40), np.float32)}
    params = {"w": jnp.zeros((48, 40))}

    def run(x):
        return tx.update({"w": x}, tx.init(params), ids={"w": jnp.arange(3)})[0]

    with pytest.raises(RuleError, match="'w', which is not a leaf synchronized by rows"):
        helpers.run_ranks(run, grads["w"], 2)


@pytest.mark.parametrize("exponent", [-80, 66])
def test_the_warm_start_is_that_of_numbers_whose_squares_are_none(exponent):
    grads = gradients()
    scaled = jax.tree.map(lambda x: np.ldexp(x, exponent).astype(np.float32), grads)
    want, got = (
        program()(x).seen[1]["kernel and 1 more"].value.right for x in (grads, scaled)
    )
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
