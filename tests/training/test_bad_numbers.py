"""A trainer whose ranks are given a NaN now and then."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.embrace import ColumnTable
from sparsejax.errors import ArgumentError, BadNumberError
from tests import helpers


N = 2
CHAIN = optax.chain(
    sparsejax.top_k(0.5, min_size=1), sparsejax.dense_sync(), optax.adam(0.1)
)


def loss_fn(params, batch, *, variables, key):
    noise = jax.random.uniform(key)
    seen = {"mean": 0.5 * (variables["mean"] + batch.mean()), "own": batch.sum()}
    return jnp.mean(params["w"] * jnp.arange(4.0)) * batch.mean() * (1 + noise), seen


@functools.cache
def trainer(tx):
    return sparsejax.data_parallel(
        loss_fn, tx, helpers.mesh_of(N), variables={"mean": "mean", "own": "by_rank"}
    )


def first(of):
    params, seen = {"w": np.ones(4, np.float32)}, {"mean": np.float32(1)}
    seen["own"] = np.float32(0)
    return of.init(params, variables=seen, key=jax.random.key(0))


SKIPPING = sparsejax.skip_nonfinite(CHAIN)
REPORTING = sparsejax.skip_nonfinite(CHAIN, report=True)
GOOD, BAD = np.array([1, 3], np.float32), np.array([1, np.nan], np.float32)


def trained(state):
    """The bytes of all that a step trains: not its number, nor the count of skips."""
    state = state._replace(opt_state=state.opt_state.inner, step=None, key=None)
    return helpers.octets(state)


def state_behind_the_error(of, state, batch, match):
    """The state that an error of a step hands on, which has trained nothing."""
    before = trained(state)
    with pytest.raises(BadNumberError, match=match) as raised:
        of.step(state, batch)
    after = raised.value.state
    assert trained(after) == before
    return after


@pytest.mark.slow
def test_a_step_that_is_skipped_changes_nothing_but_the_number_of_the_step():
    of = trainer(SKIPPING)
    state, _ = of.step(first(of), GOOD)
    before = trained(state)
    state, loss = of.step(state, BAD)
    assert np.isnan(loss)
    assert trained(state) == before
    assert int(state.step) == 2
    assert int(sparsejax.metrics(state.opt_state)["skip/skipped"]) == 1
    state, loss = of.step(state, GOOD)
    assert np.isfinite(loss)
    assert trained(state) != before


@pytest.mark.slow
def test_a_step_that_raises_says_where_and_hands_its_state_on():
    of = trainer(REPORTING)
    state, _ = of.step(first(of), GOOD)
    match = "step 1: the gradient of 'w' has a NaN on rank 1"
    state = state_behind_the_error(of, state, BAD, match)
    state, loss = of.step(state, GOOD)
    assert np.isfinite(loss)
    assert int(state.step) == 3


@pytest.mark.slow
def test_passing_on_is_what_is_done_without_a_wrapper():
    of = trainer(CHAIN)
    assert of.init({"w": np.ones(4, np.float32)}).opt_state.__class__ is tuple
    state, _ = of.step(first(of), BAD)
    assert np.isnan(np.asarray(state.params["w"])).any()


def rows_loss(params, batch):
    table = params["users"]
    read = sparsejax.lookup
    if isinstance(table, ColumnTable):
        read = sparsejax.column_lookup
    return jnp.mean(read(table, batch["ids"]) ** 2) * jnp.mean(batch["scale"])


@pytest.mark.slow
def test_rows_of_tables_are_looked_at_too():
    """Listed by `lazy`, and of tables by columns, whose gradient each rank has whole."""
    mesh, rows = helpers.mesh_of(N), sparsejax.lazy(optax.adam(1e-2))
    table = jax.random.normal(jax.random.key(0), (300, 256))
    columns = ColumnTable.create(jax.random.key(0), 300, 6, mesh)
    ids = np.arange(8, dtype=np.int32) * 7
    good = {"ids": ids, "scale": np.ones(8, np.float32)}
    bad = good | {"scale": np.where(np.arange(8) == 6, np.inf, 1).astype(np.float32)}
    for users, tx in (
        (table, optax.chain(sparsejax.zen_sync(rules={"users": "sparse"}), rows)),
        (columns, optax.chain(sparsejax.embrace_sync(vertical=False), rows)),
    ):
        tx = sparsejax.skip_nonfinite(tx, report=True)
        of = sparsejax.data_parallel(rows_loss, tx, mesh)
        state, _ = of.step(of.init({"users": users}), good)
        match = "step 1: the gradient of 'users' has a"
        state = state_behind_the_error(of, state, bad, match)
        after, _ = of.step(state, good)
        assert np.isfinite(np.asarray(jax.tree.leaves(after.params)[0])).all()


@pytest.mark.slow
def test_what_holds_gradients_back_is_refused():
    mesh = helpers.mesh_of(N)
    chain = optax.chain(sparsejax.dense_sync(), optax.sgd(0.1))
    blocks = sparsejax.embrace.horizontal(chain, order=["w"])
    for wrap in (sparsejax.skip_nonfinite, sparsejax.warm_up, sparsejax.accumulate):
        more = () if wrap is sparsejax.skip_nonfinite else (2,)
        match = rf"{wrap.__name__} .*embrace\.horizontal .*the chain without horizontal"
        with pytest.raises(ArgumentError, match=match):
            wrap(blocks, *more)
    late = optax.chain(sparsejax.embrace_sync(), sparsejax.lazy(optax.adam(1e-2)))
    columns = ColumnTable.create(jax.random.key(0), 300, 6, mesh)
    of = sparsejax.data_parallel(rows_loss, sparsejax.skip_nonfinite(late), mesh)
    batch = {"ids": np.arange(4, dtype=np.int32), "scale": np.ones(4, np.float32)}
    state = of.init({"users": columns})
    with pytest.raises(ArgumentError, match=r"skip_nonfinite.*vertical=False"):
        of.step(state, batch, None)


def test_the_argument_that_is_gone_names_the_wrapper():
    with pytest.raises(ArgumentError, match=r"bad_numbers='skip': .*skip_nonfinite\(tx\)"):
        sparsejax.data_parallel(
            loss_fn, CHAIN, helpers.mesh_of(N), **{"bad_numbers": "skip"}
        )


@pytest.mark.parametrize("where", ["of a part", *helpers.slow("in accumulate")])
def test_a_skipped_update_of_an_inner_wrapper_is_raised_once(where):
    inside = sparsejax.skip_nonfinite(sparsejax.dense_sync(), report=True)
    tx = optax.chain(inside, optax.sgd(0.5))
    every = 1
    if where == "in accumulate":
        tx, every = sparsejax.accumulate(REPORTING, 2), 2
    of = trainer(tx)
    state = first(of)
    raised = []
    for number, batch in enumerate([GOOD, GOOD, BAD, GOOD, GOOD, GOOD, GOOD, BAD]):
        try:
            state, _ = of.step(state, batch)
        except BadNumberError as error:
            raised.append(number)
            state = error.state
    # An accumulated update is taken at the end of its steps.
    assert raised == ([2, 7] if every == 1 else [3, 7])
    assert np.isfinite(state.params["w"]).all()
