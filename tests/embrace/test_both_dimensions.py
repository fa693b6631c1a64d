"""Rows held back and blocks carried, together: the whole schedule is training, too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import rows
from sparsejax.embrace import horizontal, lookahead, rows_held
from tests.embrace.model import TABLES, batch_of, params as tables_of
from tests.helpers import mesh_of


# It keeps a sum of squares; `test_vertical` has those that move rows that no step lists.
LAZY = sparsejax.lazy(optax.adagrad(0.1))
WHICH = lambda params: {k: "rows" if k in TABLES else "dense" for k in params}
STEPS = 4


def params(n):
    rng = np.random.default_rng(1)
    made = tables_of(n, sharded=True)
    width = made["kernel"].shape[0]
    return made | {"first": rng.normal(size=(width, width)).astype(np.float32) / 3}


def loss_fn(params, batch):
    ids = {k: batch["ids"][:, at] for at, k in enumerate(TABLES)}
    vectors = sparsejax.column_lookup({k: params[k] for k in TABLES}, ids)
    hidden = jnp.tanh(sum(vectors.values(), jnp.zeros(())) @ params["first"])
    errors = jnp.square((hidden @ params["kernel"])[:, 0] - batch["y"])
    return jnp.sum(jnp.where(batch["mask"], errors, 0)) / jnp.sum(batch["mask"])


@functools.cache
def trainer_of(n, vertical, carried):
    """A trainer with each dimension of the schedule, or without it."""
    optimizer = optax.partition({"rows": LAZY, "dense": optax.adam(1e-2)}, WHICH)
    tx = optax.chain(sparsejax.embrace_sync(vertical=vertical, delayed=64), optimizer)
    if carried:
        tx = horizontal(tx)
    weight = lambda batch: batch["mask"].sum()
    return sparsejax.data_parallel(loss_fn, tx, mesh_of(n), weight=weight)


@functools.cache
def trained(n, vertical, carried):
    trainer = trainer_of(n, vertical, carried)
    state, losses, held, seen = trainer.init(params(n)), [], [], []
    for batch, following in lookahead(batch_of(step, n) for step in range(STEPS)):
        told = (following,) if vertical else ()
        state, loss = trainer.step(state, batch, *told)
        losses.append(float(loss))
        held.append(sum(int(x.sum()) for x in rows_held(state.opt_state).values()))
        seen.append(float(trainer.evaluate(state, batch_of(99, n))))
    if vertical or carried:
        final = trainer.flush(state).params
    else:
        final, _ = settle(state.params, state.opt_state, LAZY)
    return losses, seen, final, held


settle = jax.jit(rows.settle, static_argnums=2)


@pytest.mark.slow
def test_both_dimensions_are_training_without_a_schedule():
    n = 2
    want, wanted, whole, _ = trained(n, vertical=False, carried=False)
    losses, seen, ours, held = trained(n, vertical=True, carried=True)
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    assert min(held[:-1]) > 0
    np.testing.assert_allclose(seen, wanted, rtol=1e-5)
    for k in ("first", "kernel"):
        np.testing.assert_allclose(ours[k], whole[k], rtol=2e-6, atol=1e-7)
    for k in TABLES:
        np.testing.assert_allclose(ours[k].whole(), whole[k].whole(), 2e-6, 1e-7)
        assert np.abs(ours[k].whole() - params(n)[k].whole()).max() > 1e-2
