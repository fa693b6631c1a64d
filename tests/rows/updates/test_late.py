"""Rows that come a step late end as if they had come in time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import rows
from sparsejax.errors import ArgumentError, LeafError
from sparsejax.rows.reads import Ids
from sparsejax.rows.updates import steps
from sparsejax.rows.updates.lazy import Lazy
from sparsejax.units.row_grads import LateRowGrads, RowGrads
from tests import helpers


HEIGHT, WIDTH, READ, STEPS = 12, 3, 4, 9
DROPS = optax.piecewise_constant_schedule(0.1, {3: 0.5, 5: 0.5, 7: 0.1})

OPTIMIZERS = {
    "sgd": (optax.sgd(DROPS), True),
    "momentum": (optax.sgd(DROPS, momentum=0.9), True),
    "adamw": (optax.adamw(DROPS, weight_decay=0.1), True),
    "adam of listed rows": (optax.adam(DROPS), False),
}


def ids_of(step):
    """Rows that a step reads: some of them are read by the next step, too."""
    rng = np.random.default_rng(step)
    return np.sort(rng.choice(HEIGHT, READ, replace=False)).astype(np.int32)


def grads_of(step):
    rng = np.random.default_rng(100 + step)
    return rng.normal(size=(READ, WIDTH)).astype(np.float32)


def row_grads(ids, grads, keep):
    ids = jnp.where(keep, ids, HEIGHT)
    return RowGrads.marked(ids, jnp.where(keep[:, None], grads, 0), (HEIGHT, WIDTH))


def params():
    table = np.random.default_rng(7).normal(size=(HEIGHT, WIDTH)).astype(np.float32)
    return {"table": jnp.asarray(table), "kernel": jnp.ones(2)}


@functools.cache
def runs(name):
    """Of each step what its rows were when they are read; and what all are at the end."""
    tx, exact = OPTIMIZERS[name]
    lazy = sparsejax.lazy(tx, exact=exact)

    def stepped(make):
        @jax.jit
        def step(params, state, ids, *given):
            read, _ = lazy.reader(params, state).rows("table", Ids(ids, ids))
            grads = {"table": make(ids, *given), "kernel": jnp.ones(2)}
            updates, state = lazy.update(grads, state, params)
            return sparsejax.apply_updates(params, updates), state, read

        return step

    late_step = stepped(
        lambda ids, grads, keep, late: LateRowGrads.of(row_grads(ids, grads, keep), late)
    )
    step = stepped(lambda ids, grads: row_grads(ids, grads, jnp.ones(READ, bool)))
    ours, state = params(), lazy.init(params())
    want, plain = params(), lazy.init(params())
    late = row_grads(ids_of(0), grads_of(0), np.zeros(READ, bool))
    reads = []
    for at in range(STEPS):
        ids, grads = ids_of(at), grads_of(at)
        keep = np.isin(ids, ids_of(at + 1))
        ours, state, read = late_step(ours, state, ids, grads, keep, late)
        want, plain, whole = step(want, plain, ids, grads)
        late = row_grads(ids, grads, ~keep)
        reads.append((read, whole))
    catch_up = jax.jit(functools.partial(steps.caught_late, lazy.inside))
    moved, state = catch_up({"table": late, "kernel": None}, state, ours)
    ours = sparsejax.apply_updates(ours, moved)
    if exact:
        settle = jax.jit(functools.partial(rows.settle, tx=lazy))
        (ours, state), (want, plain) = settle(ours, state), settle(want, plain)
    return reads, (ours, state), (want, plain)


@pytest.mark.parametrize("name", helpers.mostly_slow(OPTIMIZERS, "sgd"))
def test_rows_that_come_late_end_as_if_they_had_come_in_time(name):
    reads, ours, want = runs(name)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)
    for read, whole in reads:
        close(read, whole)
    jax.tree.map(close, ours, want)
    assert np.abs(want[0]["table"] - params()["table"]).max() > 0.05


def late_grads():
    one = row_grads(ids_of(0), grads_of(0), np.ones(READ, bool))
    return {"table": LateRowGrads.of(one, one), "kernel": jnp.ones(2)}


def test_numbers_that_are_set_by_hand_are_not_known_a_step_later():
    lazy: Lazy = sparsejax.lazy(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    state = lazy.init(params())
    with pytest.raises(ArgumentError, match=r"'table' come a step late.*learning_rate"):
        lazy.update(late_grads(), state, params())


@pytest.mark.parametrize("what", ["to_dense", "kept", "check"])
def test_who_does_not_know_late_rows_loses_none(what):
    with pytest.raises(LeafError, match=r"a table \[12, 3\] have rows of the last step"):
        getattr(late_grads()["table"], what)()
    updates = jax.tree.map(jnp.asarray, late_grads())
    with pytest.raises(LeafError, match=r"the update of 'table': .*only sparsejax.lazy"):
        sparsejax.apply_updates(params(), updates)
