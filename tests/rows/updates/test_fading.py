"""What fades is added up at once as its steps add up one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.errors import ArgumentError
from sparsejax.rows import lazy, settle
from sparsejax.rows.reads import Ids
from sparsejax.rows.updates.catch_up import fading, quadrature
from sparsejax.rows.updates.catch_up.fading import Fading
from sparsejax.rows.updates.catch_up.replay import Replay
from sparsejax.units.row_grads import RowGrads
from tests import helpers
from tests.rows.updates import runs


HEIGHT = 24
RATE = optax.exponential_decay(0.02, 1000, 0.5)
FADING = {
    "momentum": optax.sgd(RATE, momentum=0.9),
    "adam": optax.adam(RATE),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "momentum and weights that decay": optax.chain(
        optax.trace(0.9), optax.add_decayed_weights(0.01), optax.scale(-0.1)
    ),
    # Its mean of squares fades as fast, and moves no row without a gradient.
    "rmsprop with momentum": optax.rmsprop(1e-2, decay=0.9, momentum=0.9),
    "numbers that are arrays": optax.adam(jnp.float32(1e-2), b1=jnp.float32(0.9)),
}
# The sum would need more points, or m is no factor of the move, or too few numbers fade.
NOT_FADING = {
    "squares that fade as fast": optax.adam(1e-2, b1=0.9, b2=0.9),
    "a momentum of thousands of steps": optax.sgd(0.1, momentum=0.999),
    "signs": optax.lion(1e-2),
    "moves that change their form": optax.radam(1e-2),
    "an epsilon in the root": optax.adam(1e-2, eps_root=1e-3),
    "numbers set by hand": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "weights that decay by a schedule": optax.adamw(RATE),
    "signs, and weights that do not decay": optax.lion(1e-2, weight_decay=0.0),
}
PARAMS = {"table": jnp.zeros((HEIGHT, 3))}


def table_of(tx):
    tx = lazy(tx)
    plan = tx.inside.plan(PARAMS, PARAMS)
    return tx, plan.layout.tables[0], plan.way(0)


@pytest.mark.parametrize(
    "inner",
    [
        optax.sgd(0.1, momentum=0.8, nesterov=True),
        optax.nadam(1e-2, b2=0.99),
        optax.adamw(0.1, weight_decay=0.5),
    ],
    ids=["nesterov", "nadam", "weights that are soon gone"],
)
def test_what_else_fades_is_taken_to(inner):
    assert isinstance(table_of(inner)[2], Fading)


@pytest.mark.parametrize("name", NOT_FADING)
def test_what_does_not_fade_so_is_not_taken_to(name):
    way = table_of(NOT_FADING[name])[2]
    assert isinstance(way, Replay)
    assert way.moves


@pytest.mark.parametrize(
    ("name", "at_a_time"),
    [("adam", 7), *helpers.slow(*((name, HEIGHT) for name in FADING if name != "adam"))],
)
def test_gaps_of_all_lengths_are_those_of_single_steps(name, at_a_time, monkeypatch):
    """Against the optimizer itself, step by step, its moves added up in two parts.

    A momentum that is multiplied 200 times is off by 200 halves of an ulp.
    """
    monkeypatch.setattr(fading, "_ROWS", at_a_time)
    inner, end = FADING[name], 1300
    tx, table, way = table_of(inner)
    assert isinstance(way, Fading)
    rng = np.random.default_rng(0)
    last = np.array([*range(1, 13), 30, 100, 300, 700, 1000, 1290, 1297, 1298, 1299, 1300])
    last = np.concatenate([last, [1, 1]]).astype(np.int32)
    own = [rng.normal(size=(HEIGHT, 3)), 10 ** rng.uniform(-12, 2, (HEIGHT, 3))]
    own = [jnp.asarray(x, jnp.float32).at[-1].set(0) for x in own]
    # What does not decay stays at zero, where its moves are seen best.
    begun = rng.normal(size=(HEIGHT, 3)) if table.shrinks else np.zeros((HEIGHT, 3))
    begun = {"table": jnp.asarray(begun, jnp.float32).at[-1].set(0)}
    state = tx.init(PARAMS)
    leaves, structure = jax.tree.flatten(state.inner)
    for at, j in enumerate(table.own):
        leaves[j] = own[0 if (at,) == table.idle else 1]
    zero_state = jax.tree.unflatten(structure, leaves)
    counted = jax.tree.map(lambda x: x if x.ndim else jnp.int32(end), zero_state)
    (sums,) = state.kept
    steps = tx.inside.zero_steps(tx.inside.plan(PARAMS, PARAMS).layout, PARAMS)
    probe = fading.probe_of(lambda *args: fading.samples(steps, [0], *args)[0])
    known = np.unique(last[last < end - way.terms])
    nodes = lambda step: way.nodes(step[None], step + way.terms, probe)
    made = jnp.concatenate(jax.jit(jax.vmap(nodes))(known), axis=2)[:, 0]
    state = state._replace(
        step=jnp.int32(end),
        last={"table": jnp.asarray(last)},
        inner=counted,
        kept=(sums.at[known].set(made),),
    )
    got, new = jax.jit(settle, static_argnums=2)(begun, state, tx)

    def step(carry, step):
        moved, state = carry
        state = jax.tree.map(lambda x: x if x.ndim else step - 1, state)
        updates, after = inner.update(PARAMS, state, {"table": moved[0]})
        late = jnp.asarray(last < step)[:, None]
        keep = lambda a, b: jnp.where(late, a, b) if a.ndim else a
        # Each update is as the optimizer has it; their sum is kept in two parts.
        high, low = moved
        term = jnp.where(late, updates["table"], 0) + low
        total = high + term
        low = term - (total - high)
        return ((total, low), jax.tree.map(keep, after, state)), None

    start = (begun["table"], PARAMS["table"]), zero_state
    steps = jnp.arange(1, end + 1, dtype=jnp.int32)
    ((high, _), want_state), _ = jax.jit(lambda c: jax.lax.scan(step, c, steps))(start)
    # The two parts of what decays may nearly cancel; each is rounded as it is.
    atol = 1e-6 if table.shrinks else 1e-12
    np.testing.assert_allclose(got["table"], high, rtol=3e-5, atol=atol)
    for j in table.own:
        want = jax.tree.leaves(want_state)[j]
        np.testing.assert_allclose(jax.tree.leaves(new.inner)[j], want, 2e-4, 1e-30)
    np.testing.assert_array_equal(got["table"][-1], 0)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [8, runs.HEIGHT])
def test_sums_that_are_kept_are_those_of_single_steps(kept, monkeypatch):
    """Where 40 are kept, places are used again; eight are fewer than a momentum lasts.

    Each row is listed in turn, even if it is not read.
    """
    monkeypatch.setattr(fading, "PATIENCE", kept)
    inner = optax.adam(1e-2, b1=0.3)
    tx, _, way = table_of(inner)
    assert isinstance(way, Fading)
    assert way.terms == 19
    assert tx.init(PARAMS).kept[0].shape[0] == kept
    runs.check_run(inner)


@pytest.mark.parametrize("height", [1, 7, 24, 1000])
def test_no_row_waits_for_longer_than_sums_are_kept(height, monkeypatch):
    monkeypatch.setattr(fading, "PATIENCE", 8)
    for start in 0, 5:
        way = Fading(0, None, (0.9,))
        turns = [way.due(height, jnp.int32(start + step)) for step in range(8)]
        assert set(range(height)) <= set(np.concatenate(turns).tolist())
        assert max(map(len, turns)) == -(-height // 8)


def with_rate(rate):
    """SGD whose rate is an array that a program of its own closes over."""
    inner = optax.sgd(jnp.float32(rate), momentum=0.1)
    return optax.GradientTransformation(inner.init, jax.jit(inner.update))


@pytest.mark.slow
def test_tables_of_one_optimizer_share_their_sums():
    """And those of others do not, nor those whose steps are counted apart."""
    params = {name: jnp.zeros((HEIGHT, 3)) for name in "abc"}
    groups = lambda tx: [
        way.number for way in lazy(tx).inside.plan(params, params).catch_up.values()
    ]
    assert groups(optax.adam(1e-2)) == [0, 0, 0]
    of = {"x": optax.adam(1e-2), "y": optax.adam(2e-2)}
    assert groups(optax.partition(of, {"a": "x", "b": "y", "c": "x"})) == [0, 1, 0]
    # Constants of programs inside programs, which are printed without their values.
    of = {"x": with_rate(0.1), "y": with_rate(0.2), "z": with_rate(0.1)}
    assert groups(optax.partition(of, {"a": "x", "b": "y", "c": "z"})) == [0, 1, 0]
    of = {"x": optax.adam(1e-2), "y": optax.adam(1e-2)}
    assert groups(optax.partition(of, {"a": "x", "b": "y", "c": "x"})) == [0, 1, 0]


@pytest.mark.slow
def test_all_rows_are_caught_up_by_one_program():
    """And what has no late rows is no part of it, so nothing of it is copied."""
    tx = lazy(
        optax.partition(
            {"x": optax.sgd(0.1, momentum=0.9), "y": optax.sgd(0.1)}, dict(a="x", b="y")
        )
    )
    params = {name: jnp.ones((HEIGHT, 3)) for name in "ab"}
    state = tx.init(params)
    program = jax.make_jaxpr(lambda p, s: settle(p, s, tx))(params, state)
    assert len(program.jaxpr.eqns) == 1
    settled, _ = settle(params, state, tx)
    assert settled["b"] is params["b"]
    np.testing.assert_array_equal(settled["a"], params["a"])


@pytest.mark.slow
def test_one_optimizer_serves_two_models():
    """And states may be NumPy's."""
    tx = lazy(optax.sgd(0.1, momentum=0.1))
    one, two = PARAMS, {name: jnp.ones((HEIGHT, 3)) for name in "ab"}
    read = tx.reader(one, tx.init(one))
    state = jax.tree.map(np.asarray, tx.init(two))
    other = tx.reader(two, state)
    settled, _ = settle(two, state, tx)
    np.testing.assert_array_equal(settled["a"], two["a"])
    ids = Ids(jnp.array([1]), jnp.array([1]))
    rows = read.rows("table", ids)[0], other.rows("a", ids)[0]
    np.testing.assert_array_equal(jnp.concatenate(rows), [[0] * 3, [1] * 3])


def test_eigenvalues_need_no_call_of_lapack():
    """It would wait on a CPU for threads that wait for it on other devices."""
    matrices = jnp.zeros((2, quadrature.NODES, quadrature.NODES))
    assert "custom_call" not in jax.jit(quadrature.eigen).lower(matrices).as_text()


def lazily(factory):
    """A factory of lazy optimizers, with the signature of the one inside."""
    return functools.wraps(factory)(lambda *args, **kwargs: lazy(factory(*args, **kwargs)))


INJECTED = {
    "adam": (optax.adam, {}),
    "momentum": (optax.sgd, {"momentum": 0.9}),
    "sgd": (optax.sgd, {}),
}


@pytest.mark.parametrize("name", ["sgd", *helpers.slow("adam", "momentum")])
def test_rows_that_may_miss_steps_of_numbers_that_are_traced_are_refused(name):
    """What the rate was at those steps is not known; inside `lazy` it is remembered."""
    factory, options = INJECTED[name]
    rows = {"table": RowGrads(jnp.array([1]), jnp.ones((1, 3)), (HEIGHT, 3))}
    around = optax.inject_hyperparams(lazily(factory))(0.1, **options)
    match = r"values that are traced.*lazy\(optax.inject_hyperparams\(optax.adam\)"
    for grads in (rows, PARAMS):
        update = lambda grads: jax.eval_shape(
            around.update, grads, around.init(PARAMS), PARAMS
        )
        if name == "sgd":  # which moves no row without a gradient
            update(grads)
            continue
        with pytest.raises(ArgumentError, match=match):
            update(grads)
    inside = lazy(optax.inject_hyperparams(factory)(0.1, **options))
    jax.eval_shape(inside.update, rows, inside.init(PARAMS), PARAMS)


def test_it_is_traced_with_64_bits_and_without_in_one_process():
    """JAX keeps a constant of NumPy in a loop from one trace for the next."""

    def loss(wide):
        with jax.enable_x64(wide):
            tx = optax.chain(sparsejax.zen_sync(), lazy(optax.adam(1e-2)))
            loss_fn = lambda params, batch: jnp.mean(params["table"][batch] ** 2)
            trainer = sparsejax.data_parallel(loss_fn, tx, helpers.mesh_of(2))
            state = trainer.init({"table": jnp.ones((300, 6), jnp.float32)})
            return trainer.step(state, np.arange(8, dtype=np.int32))[1]

    assert loss(False) == loss(True) == loss(False)
