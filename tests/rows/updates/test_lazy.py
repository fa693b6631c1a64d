"""A lazy optimizer has the trajectory of the dense one, and touches what it must."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sparsejax.errors import StateError
from sparsejax.rows import apply_updates, lazy, settle
from sparsejax.rows.reads import Ids
from sparsejax.units.row_grads import RowGrads
from tests import helpers
from tests.rows.updates import runs
from tests.rows.updates.runs import HEIGHT, WIDTH


OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "adagrad": optax.adagrad(0.1),
    "lion": optax.lion(1e-3),
    "adabelief": optax.adabelief(1e-2),
    "decayed sgd": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "clipped and centred": optax.chain(
        optax.clip(0.02), optax.centralize(), optax.adam(1e-2)
    ),
    "an injected schedule": optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(1e-3, 2e-2, 100)
    ),
    "by leaf": optax.partition(
        {"table": optax.adam(1e-2), "others": optax.contrib.muon(1e-2)},
        {"b": "table", "table": "table", "w": "others"},
    ),
}


@pytest.mark.parametrize("name", helpers.mostly_slow(OPTIMIZERS, "momentum"))
def test_all_steps_are_those_of_the_dense_optimizer(name):
    runs.check_run(OPTIMIZERS[name])


def listed(ids, rows):
    rows = jnp.asarray(rows, jnp.float32)
    return RowGrads(jnp.asarray(ids, jnp.int32), rows, (HEIGHT, WIDTH))


def grads_of(p, ids, rows):
    zeros = {key: jnp.zeros_like(x) for key, x in p.items()}
    return {**zeros, "table": listed(ids, rows)}


def test_inexact_leaves_other_rows_as_they_are():
    tx = lazy(optax.adam(0.1), exact=False)
    p = runs.params()
    first = grads_of(p, [1, 2, 2, HEIGHT, 7], np.ones((5, WIDTH)))
    later = grads_of(p, [3, HEIGHT, HEIGHT], np.ones((3, WIDTH)))

    @jax.jit
    def step(grads, state, p):
        updates, state = tx.update(grads, state, p)
        return apply_updates(p, updates), state

    p1, state1 = step(first, tx.init(p), p)
    p2, state2 = step(later, state1, p1)
    changed = (np.asarray(p1["table"]) != p["table"]).any(1)
    assert np.flatnonzero(changed).tolist() == [1, 2, 7]
    adam1, adam2 = state1.inner[0], state2.inner[0]
    pairs = [(p1, p2), (adam1.mu, adam2.mu), (adam1.nu, adam2.nu)]
    for old, new in pairs:
        changed = (np.asarray(old["table"]) != new["table"]).any(1)
        assert np.flatnonzero(changed).tolist() == [3]
    assert adam2.count == 2
    assert isinstance(state2.last["table"], optax.MaskedNode)


@pytest.mark.parametrize("exact", [True, *helpers.slow(False)])
def test_a_listed_row_without_a_gradient_takes_its_step(exact):
    """Its momentum goes on, with exact=False too, as a row that is not listed does not."""
    tx = lazy(optax.sgd(1.0, momentum=0.5), exact=exact)
    p = runs.params()
    state, update = tx.init(p), jax.jit(tx.update)
    for rows in (np.ones((2, WIDTH)), np.zeros((2, WIDTH))):
        updates, state = update(grads_of(p, [4, 9], rows), state, p)
    # An exact step lists a row besides, so that none waits for ever.
    listed = updates["table"].ids.tolist()
    assert {4, 9} <= set(listed)
    assert len(listed) == 2 + exact
    change = updates["table"].to_dense()
    np.testing.assert_array_equal(change[jnp.array([4, 9])], -0.5)
    np.testing.assert_array_equal(change.at[jnp.array([4, 9])].set(0), 0)
    none = grads_of(p, [9, HEIGHT], np.zeros((2, WIDTH)))
    updates, state = update(none, state, p)
    np.testing.assert_array_equal(state.inner[0].trace["table"][4], 0.5)
    np.testing.assert_array_equal(state.inner[0].trace["table"][9], 0.25)


def test_a_state_without_the_sums_that_it_should_keep_is_refused():
    """As one that was saved before there were any."""
    tx, p = lazy(optax.adam(1e-2)), runs.params()
    state = tx.init(p)._replace(kept=())
    with pytest.raises(StateError, match=r"keeps the sums of 0 kinds.*1 are needed"):
        tx.update(grads_of(p, [4], np.ones((1, WIDTH))), state, p)
    with pytest.raises(StateError, match="keeps the sums of 0 kinds"):
        tx.reader(p, state)


@pytest.mark.slow
def test_a_dense_gradient_lists_all_rows():
    """A table may have rows in one step and a dense gradient in the next."""
    inner = optax.adam(0.1)
    tx = lazy(inner)
    p = want = runs.params()
    state, dense_state = tx.init(p), inner.init(p)
    rows = listed([1, 2], np.ones((2, WIDTH)))
    others = {"b": jnp.ones(3), "w": jnp.zeros((WIDTH, 3))}

    @jax.jit
    def step(table, p, state, want, dense_state):
        updates, state = tx.update({**others, "table": table}, state, p)
        p = apply_updates(p, updates)
        dense = table if isinstance(table, jax.Array) else table.to_dense()
        updates, dense_state = inner.update({**others, "table": dense}, dense_state, want)
        return p, state, optax.apply_updates(want, updates), dense_state

    for table in (rows, listed([2, HEIGHT], np.ones((2, WIDTH))), rows.to_dense(), rows):
        p, state, want, dense_state = step(table, p, state, want, dense_state)
    p, state = jax.jit(settle, static_argnums=2)(p, state, tx)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 0, 1e-6), p, want)
    np.testing.assert_array_equal(state.last["table"], 4)


def by_hand(factory, rates, row_of, settled_every=None):
    """A lazy run and a dense one whose rate is set by hand before some steps.

    Args:
        factory: The optimizer, from its rate.
        rates: Before each step; None where it is left as it is.
        row_of: From the number of a step to the row that it lists.
        settled_every: After how many steps all rows catch up.

    Returns:
        The state, the table once all rows have caught up, and that of the dense run.
    """
    inner = optax.inject_hyperparams(factory)(0.1)
    tx = lazy(inner)
    p = want = runs.params()
    state, dense_state = tx.init(p), inner.init(p)
    step, dense_step = jax.jit(tx.update), jax.jit(inner.update)
    settled = jax.jit(settle, static_argnums=2)
    (injected,) = state.inner.hyperparams.keys() & {"learning_rate", "rate"}
    for number, rate in enumerate(rates):
        for one in (state.inner, dense_state) if rate is not None else ():
            one.hyperparams[injected] = jnp.float32(rate)
        grads = grads_of(p, [row_of(number)], np.full((1, WIDTH), 0.5))
        updates, state = step(grads, state, p)
        p = apply_updates(p, updates)
        dense = {**grads, "table": grads["table"].to_dense()}
        updates, dense_state = dense_step(dense, dense_state, want)
        want = optax.apply_updates(want, updates)
        if settled_every and (number + 1) % settled_every == 0:
            p, state = settled(p, state, tx)
    return state, np.asarray(settled(p, state, tx)[0]["table"]), want["table"]


@pytest.mark.slow
def test_hyperparameters_set_by_hand_are_those_of_their_steps():
    rates = [0.1 / (number + 1) if number % 2 else None for number in range(8)]
    row_of = [1, 2, 2, 2, 3, 3, 1, 2].__getitem__
    state, got, want = by_hand(optax.adam, rates, row_of)
    since = dict(zip(sorted(state.inner.hyperparams), state.history.since, strict=True))
    assert since["learning_rate"][-4:].tolist() == [2, 4, 6, 8]
    assert since["b2"].tolist() == 64 * [-1]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


# Of each optimizer the factory, whether a row that no step has listed moves, as one of
# AdamW does, and whether one does that was listed once.
INJECTED = {
    "sgd": (optax.sgd, False, False),
    "adam": (optax.adam, False, True),
    "adamw": (optax.adamw, True, True),
}


@pytest.mark.parametrize("name", helpers.mostly_slow(INJECTED, "sgd"))
def test_a_rate_set_by_hand_at_every_step_loses_only_rows_that_move(name):
    """More changes than are remembered: row 1 misses them all, 3 is read for once then."""
    factory, never_read_moves, once_read_moves = INJECTED[name]
    rates = [0.1 / (1 + number) for number in range(80)]
    _, got, want = by_hand(factory, rates, lambda number: {0: 1, 75: 3}.get(number, 2))
    lost = np.isnan(got).all(1)
    assert lost[1] == once_read_moves
    assert set(lost[[0, 3]]) == {never_read_moves}
    np.testing.assert_allclose(got[~lost], want[~lost], rtol=0, atol=2e-6)


@pytest.mark.slow
def test_a_rate_set_by_hand_at_every_step_loses_nothing_if_rows_are_settled_every_60():
    rates = [0.1 / (1 + number) for number in range(130)]
    row_of = lambda number: 2 if number else 1
    _, got, want = by_hand(optax.adam, rates, row_of, settled_every=60)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_a_row_whose_state_needs_forgotten_numbers_is_not_a_number():
    """Its momentum is zero, so it does not move, and its second moment has decayed."""
    tx = lazy(optax.inject_hyperparams(optax.adam)(0.1, b1=0.0))
    p = runs.params()
    state = tx.init(p)
    step = jax.jit(tx.update)
    for number in range(80):
        state.inner.hyperparams["b2"] = jnp.float32(0.9 + number / 1000)
        row = {0: 1, 1: 1, 2: 3}.get(number, 2)
        grads = np.full((1, WIDTH), 0.0 if number == 1 else 0.5)
        updates, state = step(grads_of(p, [row], grads), state, p)
        p = apply_updates(p, updates)
    lost = np.isnan(settle(p, state, tx)[0]["table"]).all(1)
    assert np.flatnonzero(lost).tolist() == [1, 3]


def test_one_of_two_tables_is_updated_by_rows_though_the_optimizer_has_no_state():
    """Only the steps that rows have seen show which table it is."""
    p = {k: jnp.ones((HEIGHT, WIDTH)) for k in "ab"}
    rows = lazy(optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)))
    both = {"rows": rows, "dense": optax.sgd(0.1)}
    for tx in (
        optax.partition(both, {"a": "rows", "b": "dense"}),
        optax.masked(rows, {"a": True, "b": False}),
    ):
        grads = {"a": listed([0], np.zeros((1, WIDTH))), "b": jnp.zeros((HEIGHT, WIDTH))}
        updates, state = tx.update(grads, tx.init(p), p)
        settled, _ = settle(apply_updates(p, updates), state, rows)
        np.testing.assert_allclose(settled["a"], 0.99, rtol=1e-6)
        np.testing.assert_array_equal(settled["b"], 1)


@pytest.mark.parametrize("narrow", [jnp.float8_e4m3fn, jnp.bfloat16, jnp.float16])
def test_an_optimizer_may_round_to_any_dtype(narrow):
    cast = optax.stateless(lambda grads, _: grads.astype(narrow).astype(grads.dtype))
    tx, p = lazy(optax.chain(cast, optax.sgd(0.1))), jnp.ones((HEIGHT, WIDTH), jnp.bfloat16)
    updates, _ = tx.update(listed([1], np.full((1, WIDTH), 1.09, p.dtype)), tx.init(p), p)
    rounded = jnp.asarray(1.09, p.dtype).astype(narrow).astype(p.dtype)
    np.testing.assert_allclose(np.float32(updates.rows), -0.1 * np.float32(rounded), 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.9, None])
def test_a_label_may_be_that_of_a_whole_subtree(momentum):
    """And then `optax.partition` leaves one node in place of all that it leaves out."""
    rows = lazy(optax.sgd(0.1, momentum))
    tables = {k: jnp.ones((HEIGHT, WIDTH)) for k in "ab"}
    p = {"tables": tables, "rest": {"w": jnp.ones(2)}}
    labels = {"tables": "rows", "rest": "dense"}
    tx = optax.partition({"rows": rows, "dense": optax.sgd(0.1)}, labels)
    state, row = tx.init(p), np.ones((1, WIDTH), np.float32)
    update = jax.jit(tx.update)
    for moved in (1, 0, 0):
        tables = {"a": listed([1], moved * row), "b": listed([2], row)}
        grads = {"tables": tables, "rest": {"w": jnp.ones(2)}}
        if not moved:
            tables["a"] = listed([HEIGHT], row)
        updates, state = update(grads, state, p)
        p = apply_updates(p, updates)
    ids, fallen = jnp.array([1, 2]), 0.1 * (1 + 0.9 + 0.81 if momentum else 1)
    want = np.outer([1 - fallen, 1], np.ones(WIDTH)).astype(np.float32)
    read, _ = rows.reader(p, state).rows("tables/a", Ids(ids, ids))
    np.testing.assert_allclose(read, want, rtol=1e-6)
    p, _ = settle(p, state, rows)
    np.testing.assert_allclose(p["tables"]["a"][ids], want, rtol=1e-6)
    np.testing.assert_allclose(p["rest"]["w"], 0.7, rtol=1e-6)
