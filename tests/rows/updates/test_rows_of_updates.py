"""Updates by rows are added in place, and Adagrad with one number a row."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sparsejax.errors import ArgumentError
from sparsejax.rows import apply_updates, rowwise_adagrad
from sparsejax.units.row_grads import RowGrads


def test_rows_are_added_where_they_belong_and_the_rest_as_optax_does():
    params = {
        "table": jnp.zeros((6, 2), jnp.bfloat16),
        "w": jnp.ones(3),
        "none": None,
        "masked": jnp.ones(2),
    }
    ids = jnp.array([5, 0, 5, 6, -1], jnp.int32)
    rows = RowGrads(ids, jnp.arange(10.0).reshape(5, 2), (6, 2))
    updates = {"table": rows, "w": jnp.ones(3), "none": None, "masked": optax.MaskedNode()}
    made = apply_updates(params, updates)
    want = np.zeros((6, 2))
    want[0], want[5] = [2, 3], [4, 6]
    np.testing.assert_array_equal(made["table"].astype(jnp.float32), want)
    assert made["table"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(made["w"], 2)
    assert made["none"] is None
    assert made["masked"] is params["masked"]


EPS, START, RATE = 1e-3, 0.25, 0.5


def by_hand(grads):
    """Parameters and accumulators after gradients of [5, 2, 3], in float64."""
    p, sums = np.zeros((5, 2, 3)), np.full(5, START)
    for g in grads.astype(np.float64):
        sums += (g**2).mean((1, 2))
        p -= RATE * g / (np.sqrt(sums) + EPS)[:, None, None]
    return p, sums


@pytest.mark.parametrize("by_rows", [True, False])
def test_rowwise_adagrad_has_one_number_a_row(by_rows):
    tx = rowwise_adagrad(RATE, EPS, START)
    params = {"table": jnp.zeros((5, 2, 3)), "b": jnp.zeros(2)}
    grads = np.zeros((3, 5, 2, 3), np.float32)
    grads[:, [1, 4]] = np.random.default_rng(0).normal(size=(3, 2, 2, 3))
    state, update = tx.init(params), jax.jit(tx.update)
    for g in grads:
        table = jnp.asarray(g)
        if by_rows:
            # Row 4 in two parts, and a place without a row.
            ids = jnp.array([4, 1, 4, 5], jnp.int32)
            rows = jnp.stack([table[4] * 0.25, table[1], table[4] * 0.75, table[0] + 9])
            table = RowGrads(ids, rows, (5, 2, 3))
        updates, state = update({"table": table, "b": jnp.ones(2)}, state)
        params = apply_updates(params, updates)
    want, sums = by_hand(grads)
    accumulators = state.inner[0].accumulators
    assert accumulators["table"].shape == (5,)
    np.testing.assert_allclose(params["table"], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(accumulators["table"], sums, rtol=1e-6)
    np.testing.assert_allclose(accumulators["b"], START + 3, rtol=1e-6)


def test_rowwise_adagrad_takes_schedules_and_a_row_of_zeros():
    tx = rowwise_adagrad(optax.linear_schedule(1.0, 0.0, 2), eps=0)
    params = jnp.ones((3, 2))
    state = tx.init(params)
    grads = jnp.array([[3.0, 4], [0, 0], [0, 0]])
    for rate in (1.0, 0.5):
        updates, state = tx.update(grads, state)
        root = np.sqrt(12.5 * (1 if rate == 1 else 2))
        np.testing.assert_allclose(updates[0], -rate * grads[0] / root, rtol=1e-6)
        np.testing.assert_array_equal(updates[1:], 0)


def test_rowwise_adagrad_refuses_numbers_below_zero():
    with pytest.raises(ArgumentError, match="eps must be at least 0, got -1"):
        rowwise_adagrad(0.1, eps=-1)
    with pytest.raises(ArgumentError, match="initial_accumulator must be at least 0"):
        rowwise_adagrad(0.1, initial_accumulator=-0.5)
