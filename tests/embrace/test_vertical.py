"""Training with rows that are held back is training without."""

import functools

import jax
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import rows
from sparsejax.embrace import lookahead, rows_held
from tests import helpers
from tests.embrace.model import TABLES, batch_of, loss_fn, params
from tests.helpers import mesh_of


DROPS = optax.piecewise_constant_schedule(0.1, {2: 0.3, 3: 0.3})
EACH = {
    "sgd": optax.sgd(DROPS, momentum=0.9),
    "adagrad": optax.adagrad(DROPS),
    "adam": optax.adam(1e-2),
    "kernel": optax.adam(1e-2),
}
ALL = optax.partition(EACH, {k: k for k in EACH})
LAZY = {exact: sparsejax.lazy(ALL, exact=exact) for exact in (True, False)}
STEPS = 5


@functools.cache
def trainer_of(n, exact, vertical, delayed=64):
    tx = sparsejax.embrace_sync(vertical=vertical, delayed=delayed)
    tx = optax.chain(tx, LAZY[exact])
    weight = lambda batch: batch["mask"].sum()
    return sparsejax.data_parallel(loss_fn, tx, mesh_of(n), weight=weight)


@functools.cache
def trained(n, exact, vertical, delayed=64):
    """The losses, the state after the steps, and how many rows were held back."""
    trainer = trainer_of(n, exact, vertical, delayed)
    state, losses, held = trainer.init(params(n, sharded=True)), [], []
    for batch, following in lookahead(batch_of(step, n) for step in range(STEPS)):
        told = (following,) if vertical else ()
        state, loss = trainer.step(state, batch, *told)
        losses.append(float(loss))
        held.append(sum(int(x.sum()) for x in rows_held(state.opt_state).values()))
    return losses, state, held


def settled(state, exact):
    return jax.jit(rows.settle, static_argnums=(2,), static_argnames="flushed")(
        state.params, state.opt_state, LAZY[exact], flushed=True
    )


@pytest.mark.parametrize(
    ("n", "exact", "delayed"),
    [
        (2, False, 64),
        *helpers.slow((2, True, 64), (3, False, 64), (3, True, 3), (4, False, 2)),
    ],
)
def test_it_is_training_without_a_schedule(n, exact, delayed):
    """SGD, Adagrad and Adam: what is read at each step, and all after the last."""
    losses, state, held = trained(n, exact, vertical=True, delayed=delayed)
    want, whole, _ = trained(n, exact, vertical=False)
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    assert min(held[:-1]) > 0
    assert held[-1] == 0
    ours, theirs = (settled(x, exact) for x in (state, whole))
    for k in TABLES:
        np.testing.assert_allclose(ours[0][k].whole(), theirs[0][k].whole(), 2e-6, 1e-7)
    np.testing.assert_allclose(ours[0]["kernel"], theirs[0]["kernel"], rtol=2e-6)
    moved = np.abs(theirs[0]["adam"].whole() - params(n, sharded=False)["adam"])
    assert moved.max() > 1e-2
