"""Arrays given by their entries. That every scheme adds them up: `test_conservation`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.units import entries
from sparsejax.units.sparse_tensor import SparseTensor
from tests import helpers


SIZE = 3001


def tensors_of(x, capacity, rng):
    """Each rank's non-zero units in an order of its own, the first one twice."""
    indices = np.full((len(x), capacity), x.shape[1], np.int32)
    values = np.ones((len(x), capacity, *x.shape[2:]), x.dtype)  # of unused entries too
    for rank, row in enumerate(x):
        units = rng.permutation(np.flatnonzero((row != 0).reshape(len(row), -1).any(1)))
        units = np.append(units, units[0])
        at = rng.permutation(capacity)[: len(units)]
        indices[rank, at] = units
        values[rank, at] = row[units]
        row[units[0]] *= 2
    return indices, values


@pytest.mark.parametrize("shape", [(3,), *helpers.slow(((),))])
def test_entries_are_the_array_in_the_order_of_its_units(shape):
    rng = np.random.default_rng(0)
    x = helpers.gradients(2, SIZE, 0.1, shape=shape)
    indices, values = tensors_of(x, 400, rng)
    for rank in range(2):
        halves = [
            SparseTensor(jnp.asarray(indices[rank]), jnp.asarray(v), (SIZE, *shape))
            for v in (values[rank], 2 * values[rank])
        ]
        laid = jax.jit(entries.of_tensors)(halves)
        assert laid.shape == (2 * SIZE, *shape)
        want = np.concatenate([x[rank], 2 * x[rank]])
        np.testing.assert_array_equal(laid.dense(), want)
        units = np.flatnonzero(np.asarray(laid.flags))
        places = laid.place(jnp.asarray(units))
        np.testing.assert_array_equal(places, np.arange(len(units)))


def test_shared_indices_do_not_travel():
    """Where all ranks have the same indices what is sent is an all-reduce of the values."""
    n, capacity = 8, 256
    at = np.random.default_rng(3).permutation(SIZE)[:capacity].astype(np.int32)
    values = np.arange(n * capacity, dtype=np.float32).reshape(n, capacity)
    tx = optax.chain(sparsejax.zen_sync(reduce="sum", rules={"": "sparse"}))

    def run(values):
        grads = {"w": SparseTensor(jnp.asarray(at), values, (SIZE,), shared=True)}
        state = tx.init({"w": jnp.zeros(SIZE)})
        total, state = tx.update(grads, state)
        return total["w"], sparsejax.metrics(state)["sync/wire_bytes"]

    total, sent = helpers.run_ranks(run, values, n)
    helpers.assert_same_on_all_ranks(total)
    want = np.zeros(SIZE)
    want[at] = values.sum(0)
    np.testing.assert_array_equal(total[0], want)
    assert sent[0] == 2 * (n - 1) / n * 4 * capacity
