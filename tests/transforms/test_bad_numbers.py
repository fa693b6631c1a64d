"""NaN, infinities and sums too large for 16 bits: all ranks do the same, and forget them.

Schemes, sparsifiers and systems of each kind, with `skip_nonfinite(report=True)`, which
leaves a step out and says where it was, and without. What exact schemes make of such
numbers says `tests.laws.test_exact_sum`, to the bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import schemes, skip_nonfinite, sparsifiers
from sparsejax.errors import ArgumentError, BadNumberError, StateError
from sparsejax.transforms import check_numbers
from sparsejax.units.row_grads import RowGrads
from tests import helpers
from tests.laws import test_conservation as tables


N, SIZE = 4, 2003
PAIR = ("hosts", "chips")
RULES = {"w": "sparse"}
SHAPES = {"bias": (7,), "w": (SIZE,)}


class Case(NamedTuple):
    """A chain, and what it is given.

    Attributes:
        make: Makes the chain that synchronizes, without optimizer.
        axes: The mesh axes of the ranks.
        dtype: Of `w` where a sum is to be too large for 16 bits.
        large: What its elements are there, by rank.
    """

    make: Callable[[], Any]
    axes: Any = helpers.AXIS
    dtype: str = "float16"
    large: tuple[float, ...] = (60_000, 60_000, 0, 0)


def summing(scheme, **options):
    return lambda: sparsejax.sync(scheme, reduce="sum", rules=RULES, **options)


def selecting(make):
    own = lambda: sparsejax.sparsify(make(0.05), min_size=100)
    return lambda: optax.chain(own(), sparsejax.dense_sync(reduce="sum"))


EXACT = {
    "Zen": Case(summing(schemes.Zen())),
    "TwoLevel": Case(
        lambda: sparsejax.sync(schemes.Zen(), PAIR, reduce="sum", rules=RULES), axes=PAIR
    ),
    "Zen, narrow": Case(
        summing(schemes.Zen(), wire_dtype="float16"), dtype="float32", large=(1e6, 0, 0, 0)
    ),
}
SPARSIFIERS = {name: Case(selecting(make)) for name, make in tables.SPARSIFIERS.items()}
SYSTEMS = {
    "DGC, momentum": Case(
        lambda: optax.chain(
            sparsejax.dgc(0.05, memory=sparsejax.MomentumCorrection(0.9), min_size=100),
            sparsejax.zen_sync(reduce="sum"),
        )
    ),
    "OkTopk": Case(summing(schemes.OkTopk(0.05, threshold_every=4))),
}
CASES = EXACT | SPARSIFIERS | SYSTEMS
ALWAYS = ["TopK"]
# Two axes, a narrow wire, and a state that is taken back of a scheme and of a memory.
OTHERS = ["TwoLevel", "Zen, narrow", "OkTopk", "DGC, momentum"]
BY_TURNS = {
    name for name, make in tables.SPARSIFIERS.items() if getattr(make(0.1), "shared", False)
}
# Of magnitudes, and rounded; and each other sparsifier once.
SHOWN = ["TopK", "Sign"]
PASSED_ON = [name for name in SPARSIFIERS if name not in SHOWN and "," not in name]
PASSED_ON += ["DGC, momentum"]


def program(case, tx):
    """From gradients [n, steps, ...] to updates and states by step, both by rank."""

    def on_rank(grads):
        grads = jax.tree.map(lambda x: x[0], grads)
        params = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), grads)

        def step(state, grad):
            updates, state = tx.update(grad, state, params)
            return state, (updates, state)

        return jax.tree.map(
            lambda x: x[None], jax.lax.scan(step, tx.init(params), grads)[1]
        )

    two = case.axes == PAIR
    mesh = helpers.grid(hosts=2, chips=2) if two else helpers.mesh_of(N)
    specs = {"in_specs": P(case.axes), "out_specs": P(case.axes)}
    run = jax.jit(helpers.shard_map(on_rank, mesh=mesh, **specs))
    return lambda grads: jax.tree.map(np.asarray, run(grads))


def gradients(steps, dtype, seed=0):
    rng = np.random.default_rng(seed)
    dtypes = {"bias": "float32", "w": dtype}
    return {
        name: rng.standard_t(3, (N, steps, *shape)).clip(-100, 100).astype(dtypes[name])
        for name, shape in SHAPES.items()
    }


# --- Left out.

# Of seven steps these are bad: number, leaf, rank, and what the error says.
BAD = {
    1: ("w", 1, np.nan, r"step 1: the gradient of 'w' has a NaN on rank 1\."),
    2: ("w", 2, np.inf, r"step 2: the gradient of 'w' has an infinity on rank 2\."),
    3: ("bias", 0, -np.inf, r"step 3: the gradient of 'bias' has an infinity on rank 0\."),
    4: ("w", None, None, r"step 4: the sum of 'w' over the ranks is not finite"),
}
GOOD = [0, 5, 6]


def with_bad_steps(case):
    grads = gradients(7, case.dtype)
    for step, (leaf, rank, value, _) in BAD.items():
        if rank is None:
            large = np.array(case.large)[:, None]
            grads["w"][:, step] = np.where(large > 0, large, grads["w"][:, step])
        else:
            grads[leaf][rank, step].flat[5] = value
    return grads


def at(tree, step):
    return jax.tree.map(lambda x: x[:, step], tree)


@pytest.mark.parametrize("name", [*ALWAYS, *helpers.slow(*OTHERS)])
def test_a_bad_step_is_left_out_everywhere_and_told(name):
    case = CASES[name]
    axes = case.axes if case.axes == PAIR else None
    chain = optax.chain(case.make(), optax.sgd(0.1, momentum=0.9))
    run = program(case, skip_nonfinite(chain, axes, report=True))
    grads = with_bad_steps(case)
    updates, states = run(grads)
    helpers.assert_same_on_all_ranks((updates, states.skipped, states.found.last))
    before = at(states.inner, 0)
    for step, (*_, said) in BAD.items():
        applied = any(x.any() for x in jax.tree.leaves(at(updates, step)))
        assert not applied, f"step {step} is applied, which is to be left out: {said}"
        assert helpers.octets(at(states.inner, step)) == helpers.octets(before), (
            f"step {step} is kept"
        )
        assert (states.skipped[:, step] == step).all()
        own = jax.tree.map(lambda x, step=step: x[0, step], states)
        with pytest.raises(BadNumberError, match=said):
            check_numbers(own)
        check_numbers(own, since=step + 1)
    # Without them, by the same program: at its end they cannot change anything.
    order = [*GOOD, *BAD]
    clean, after = run({name: x[:, order] for name, x in grads.items()})
    for now, step in enumerate(GOOD):
        assert helpers.octets(at(updates, step)) == helpers.octets(at(clean, now))
        assert helpers.octets(at(states.inner, step)) == helpers.octets(
            at(after.inner, now)
        )
    assert np.asarray(updates["w"][:, GOOD]).any()


@pytest.mark.slow
def test_all_ranks_with_such_numbers_are_counted_and_the_first_is_named():
    case = CASES["Zen"]
    grads = gradients(1, "float32")
    grads["w"][2, 0, 3] = grads["w"][1, 0, 9] = grads["bias"][3, 0, 1] = np.nan
    run = program(case, skip_nonfinite(case.make(), report=True))
    own = jax.tree.map(lambda x: x[0, 0], run(grads)[1])
    match = r"'w' has a NaN on rank 1, the first of 3 ranks that have such numbers\."
    with pytest.raises(BadNumberError, match=match):
        check_numbers({"of": [own]})


def skipping(make, grads):
    """The updates, and how many steps were left out so far, by step."""
    grads = {"w": np.asarray(grads)}
    run = program(Case(make), skip_nonfinite(make()))
    updates, states = run(grads)
    return updates["w"][0], states.skipped[0].tolist()


@pytest.mark.slow
def test_what_waits_and_is_too_large_for_16_bits_leaves_out_each_step_that_follows():
    """Two elements, of which the larger goes; what waits of the other one adds up."""
    grads = np.zeros((2, 5, 2), np.float16)
    grads[:, :2] = [[[65_024, 30_000]], [[-64_000, 30_000]]]
    top = sparsejax.top_k(0.5, min_size=1)
    make = lambda: optax.chain(top, sparsejax.dense_sync(reduce="sum"))
    updates, skipped = skipping(make, np.concatenate([grads, 0 * grads]))
    assert skipped == [0, 0, 1, 2, 3]
    assert (updates[:2] == [1024, 0]).all()
    assert not updates[2:].any()


def test_sums_too_large_for_32_bits_are_not_looked_for():
    make = lambda: sparsejax.dense_sync(reduce="sum")
    updates, skipped = skipping(make, np.full((N, 1, 3), 3e38, np.float32))
    assert np.isposinf(updates).all()
    assert skipped == [0]


@pytest.mark.parametrize(
    ("dtype", "wire_dtype", "choices"),
    [
        ("float32", None, 1),
        ("bfloat16", None, 1),
        ("float32", "bfloat16", 1),
        ("float16", None, 2),
        ("float32", "float16", 2),
    ],
)
def test_the_old_state_is_kept_where_a_sum_may_be_too_large_alone(
    dtype, wire_dtype, choices
):
    """One choice leaves out what a rank has given, another one what came of it."""
    tx = skip_nonfinite(sparsejax.dense_sync(wire_dtype=wire_dtype))
    run = lambda x: tx.update({"w": x}, tx.init(helpers.parameters({"w": x})))[0]
    traced = jax.make_jaxpr(helpers.stacked(run, N))(jnp.zeros((N, 9), dtype))
    assert str(traced).count("= cond[") == choices


# --- Passed on.


def only_where_it_was(updates, bad):
    """Later, too, as far as one waits; no other element, and no more once all are out."""
    found = ~np.isfinite(updates["w"][0])
    assert not found[:, ~bad].any()
    assert np.isfinite(updates["bias"]).all()
    return found


@pytest.mark.parametrize("name", [*SHOWN, *helpers.slow(*PASSED_ON)])
def test_what_is_passed_on_shows_on_all_ranks_and_is_forgotten(name):
    case, steps = CASES[name], 12
    grads = gradients(steps, "float32", seed=1)
    flat = grads["w"]
    flat[1, 1, 17], flat[2, 1, 1000], flat[0, 1, 1500] = np.nan, np.inf, -np.inf
    # Two NaNs at one place have two payloads, and infinities make one of their own.
    flat[:2, 1, 40] = np.array([0x7FC12345, 0xFFC00777], np.uint32).view(np.float32)
    flat[2:, 1, 40] = np.inf, -np.inf
    updates, states = program(case, case.make())(grads)
    helpers.assert_same_on_all_ranks(updates)
    bad = np.isin(np.arange(SIZE), [17, 40, 1000, 1500])
    found = only_where_it_was(updates, bad)
    if name not in BY_TURNS:  # of which those go whose turn it is
        assert (found.any(0) == bad).all()
        # Of ranks that select by a hash one may have no slot for it, and send it later.
        once = bad & (np.arange(steps) == 1)[:, None]
        assert name == "Dragonn" or (found == once).all(), "once, in its step"
        assert not found[6:].any(), "and soon"
        exact = updates["w"][0]
        assert np.isnan(exact[:, [17, 40]]).any(0).all()
        assert np.isposinf(exact[:, 1000]).any()
        assert np.isneginf(exact[:, 1500]).any()
    if name == "Sign":  # The others are rounded, all of a rank to one magnitude.
        assert len(np.unique(updates["w"][0, 1][~bad])) <= 2**N
    last = jax.tree.map(lambda x: x[:, -1], states)
    held = sparsejax.residuals(last)["w"]
    assert np.isfinite(held)[..., ~bad].all()
    if name not in BY_TURNS:
        assert np.isfinite(held).all()
    if "momentum" in name:
        return
    # No other element has lost anything.
    given = flat[..., ~bad].astype(np.float64)
    sent = updates["w"][0][..., ~bad].astype(np.float64).sum(0)
    waits = held[..., ~bad].astype(np.float64).sum((0, 1))
    error = np.abs(given.sum((0, 1)) - sent - waits)
    assert (error <= 1e-5 * np.abs(given).sum((0, 1)) + 1e-30).all()


def test_a_threshold_that_is_no_number_is_used_once():
    """More NaNs than are to be sent make the threshold one; it is used for four steps."""
    make = lambda density: sparsifiers.ReuseThreshold(density, every=8)
    case = Case(selecting(make))
    grads = gradients(6, "float32")
    grads["w"][:, 0, ::4] = np.nan
    updates, _ = program(case, case.make())(grads)
    sent = np.isfinite(updates["w"][0]) & (updates["w"][0] != 0)
    # A room of 126 elements a step, 501 NaNs: from then on the largest go.
    assert (sent[5:].sum(1) > 100).all()


def test_a_sum_of_several_steps_forgets_it():
    case = Case(lambda: sparsejax.accumulate(sparsejax.dense_sync(), 2))
    grads = gradients(6, "float32")
    grads["w"][1, 0, 3], grads["w"][2, 1, 4] = np.nan, np.inf
    updates, states = program(case, case.make())(grads)
    helpers.assert_same_on_all_ranks(updates)
    found = ~np.isfinite(updates["w"][0])
    assert np.argwhere(found).tolist() == [[1, 3], [1, 4]]
    assert np.isfinite(states.pending.value["w"][:, 1:]).all()


@pytest.mark.slow
def test_what_is_too_large_for_the_wire_is_infinite_there_alone():
    case = EXACT["Zen, narrow"]
    grads = gradients(1, "float32")
    grads["w"][2, 0, 5], grads["w"][1, 0, 9] = 1e6, -1e6
    updates, _ = program(case, case.make())(grads)
    helpers.assert_same_on_all_ranks(updates)
    found = updates["w"][0, 0]
    assert np.argwhere(~np.isfinite(found)).tolist() == [[5], [9]]
    assert (found[[5, 9]] == [np.inf, -np.inf]).all()


@pytest.mark.parametrize("scheme", [schemes.Zen(), *helpers.slow(schemes.AGSparse())])
def test_of_rows_only_the_number_itself_is_bad(scheme):
    tx = sparsejax.sync(scheme, reduce="sum", rules=RULES)
    height, ids = 400, np.arange(N * 6).reshape(N, 6) % 20

    def on_rank(ids, rows):
        grads = {"w": RowGrads(ids, rows, (height, 3))}
        out = tx.update(grads, tx.init({"w": jnp.zeros((height, 3))}))[0]["w"]
        return out.to_dense()

    rows = np.random.default_rng(0).integers(-4, 5, (N, 6, 3)).astype(np.float32)
    rows[1, 2, 1], rows[3, 0, 2], rows[0, 4, 0] = np.nan, np.inf, -np.inf
    sums = helpers.ranked(on_rank, N)(ids, rows)
    helpers.assert_same_on_all_ranks(sums)
    want = np.zeros((height, 3), np.float32)
    np.add.at(want, ids, rows)
    np.testing.assert_array_equal(sums[0], want)


# --- What it costs, and what it refuses.


def sent(report=None):
    tx = optax.chain(sparsejax.dense_sync(), optax.sgd(0.1))
    tx = tx if report is None else skip_nonfinite(tx, report=report)
    run = lambda x: tx.update({"w": x}, tx.init(helpers.parameters({"w": x})))[0]
    seen = helpers.traced_collectives(run, jnp.zeros((N, 9)), N)
    return [(each.name, each.bytes) for each in seen]


def test_a_word_of_each_rank_is_sent():
    assert sent(report=False) == [("pmax", 4), *sent()]
    assert sent(report=True) == [("all_gather", 4), *sent()]


def test_shards_that_only_one_rank_of_another_axis_has():
    """All devices leave the step out where one shard has a NaN, or is too large."""
    mesh = helpers.grid(data=2, model=2)
    tx = skip_nonfinite(sparsejax.dense_sync("data", reduce="sum"), "data", report=True)

    def on_rank(x):
        grads = {"w": x[0], "b": jnp.sum(x[0], 1)}

        def step(state, grad):
            updates, state = tx.update(grad, state)
            return state, (updates["w"], state.found.last)

        first = jax.tree.map(lambda x: x[0], grads)
        state = tx.init(helpers.parameters(first))
        updates, last = jax.lax.scan(step, state, grads)[1]
        return updates, last[None, None]

    run = helpers.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=P("data", None, "model"),
        out_specs=(P(None, "model"), P("data", "model")),
    )
    x = np.ones((2, 3, 8), np.float16)
    x[1, 1, 6], x[:, 2, 1] = np.nan, 60_000
    updates, last = jax.jit(run)(x)
    assert (np.asarray(updates).any(1) == [True, False, False]).all()
    assert (np.asarray(last)[..., 1, :2] == [1, 1]).all()
    assert (np.asarray(last)[..., 2, :2] == [2, -1]).all()


def test_what_is_refused():
    tx = skip_nonfinite(sparsejax.zen_sync(), report=True)
    with pytest.raises(ArgumentError, match="skip_nonfinite wraps an optax transform"):
        skip_nonfinite(schemes.Zen())
    params = {"w": jnp.zeros(3)}
    state, silent = tx.init(params), skip_nonfinite(sparsejax.zen_sync()).init(params)
    check_numbers(state)
    with pytest.raises(StateError, match="does not say where numbers were not finite"):
        check_numbers(silent)
    with pytest.raises(ArgumentError, match="check_numbers reads numbers, and was called"):
        jax.eval_shape(check_numbers, state)
    with pytest.raises(ArgumentError, match="since must be an int of at least 0"):
        check_numbers(state, since=-1)

    def update(given, leaf="w"):
        run = lambda x: tx.update({leaf: x}, given)[0]
        jax.eval_shape(helpers.stacked(run, N), jnp.zeros((N, 3)))

    update(state)
    with pytest.raises(StateError, match="has report=True, and its state does not say"):
        update(silent)
    with pytest.raises(StateError, match="have the leaf 'v', and the state was made for"):
        update(state, "v")
