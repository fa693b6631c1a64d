"""Where a step runs: in place, in `shard_map` with types checked, in a chain."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sparsejax.errors import ArgumentError, StateError
from sparsejax.rows import apply_updates, lazy, rowwise_adagrad, settle, value_and_grad
from sparsejax.rows.updates.state import LazyState
from sparsejax.state.per_rank import find
from sparsejax.units.row_grads import RowGrads
from tests import helpers


HEIGHT, WIDTH, IDS = 10_000_000, 16, 16_384


OPTIMIZERS = {"adam": lazy(optax.adam(1e-3)), "a number a row": rowwise_adagrad(0.1)}


@pytest.mark.parametrize("name", helpers.mostly_slow(OPTIMIZERS, "adam"))
def test_a_step_allocates_nothing_of_the_size_of_the_table(name):
    """With the loss, the optimizer and the sum: no copy of a table or of its counters."""
    tx = OPTIMIZERS[name]
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {"table": array((HEIGHT, WIDTH)), "w": array((WIDTH, 8))}

    def loss(p, ids):
        return jnp.mean(jnp.tanh(p["table"][ids] @ p["w"]) ** 2)

    def step(params, state, ids):
        read = tx.reader(params, state)
        value, grads = value_and_grad(loss, read=read)(params, ids)
        updates, state = tx.update(grads, state, params, read=read)
        return apply_updates(params, updates), state, value

    state = jax.eval_shape(tx.init, params)
    ids = jax.ShapeDtypeStruct((IDS,), jnp.int32)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, ids).compile()
    memory = compiled.memory_analysis()
    # The smallest array of the table's height, and what the rows of this step need.
    assert memory.temp_size_in_bytes < min(4 * HEIGHT, 60 * 4 * IDS * WIDTH)
    whole = sum(x.size * 4 for x in jax.tree.leaves((params, state)))
    assert memory.alias_size_in_bytes > 0.99 * whole
    copies = re.findall(rf"= \w+\[{HEIGHT}[^=]*copy\(.*", compiled.as_text())
    assert not copies


TABLE = {"table": jnp.asarray(np.random.default_rng(0).normal(size=(20, 3)), jnp.float32)}
BATCHES = np.random.default_rng(1).integers(0, 20, (6, 4, 5)).astype(np.int32)


def square(p, ids):
    return jnp.sum((p["table"][ids] - 1) ** 2)


@pytest.mark.slow
def test_a_partition_hands_on_some_of_the_leaves():
    """Of those that it does not, a loss reads what they are; a late row is caught up.

    A metric reads the whole table, as it should be.
    """
    inner, kinds = optax.adam(0.1), {"other": "rest", "table": "rows"}
    ours = lazy(inner)
    both = {"rest": optax.sgd(0.5), "rows": ours}
    tx = optax.partition(both, kinds)
    dense = optax.partition(both | {"rows": inner}, kinds)
    both = {"other": TABLE["table"][:7], **TABLE}

    def loss(p, ids):
        value = square(p, ids) + square({"table": p["other"]}, ids[:3] % 7)
        return value, jax.lax.stop_gradient(p["table"]).sum()

    @jax.jit
    def step(p, state, ids):
        read = ours.reader(p, state)
        value, grads = value_and_grad(loss, has_aux=True, read=read)(p, ids)
        grads["other"] = grads["other"].to_dense()
        updates, state = tx.update(grads, state, p, read=read)
        return apply_updates(p, updates), state, value

    @jax.jit
    def dense_step(p, state, ids):
        value, grads = jax.value_and_grad(loss, has_aux=True)(p, ids)
        updates, state = dense.update(grads, state, p)
        return optax.apply_updates(p, updates), state, value

    p, state = both, tx.init(both)
    want, dense_state = both, dense.init(both)
    for ids in BATCHES[:, 0]:
        p, state, value = step(p, state, ids)
        want, dense_state, dense_value = dense_step(want, dense_state, ids)
        np.testing.assert_allclose(value, dense_value, rtol=1e-5)
    settled, state = jax.jit(settle, static_argnums=2)(p, state, ours)
    (lazy_state,) = find(state, LazyState)
    assert lazy_state.last["table"].min() == len(BATCHES)
    for name, leaf in want.items():
        np.testing.assert_allclose(settled[name], leaf, rtol=0, atol=2e-6)
    assert np.abs(p["table"] - want["table"]).max() > 1e-3
    with pytest.raises(StateError, match=r"not one of these parameters.*nnx\.as_pure"):
        lazy(inner).reader(both, state)


def test_rows_of_another_table_are_refused():
    rows = RowGrads(jnp.zeros(2, jnp.int32), jnp.zeros((2, 3)), (5, 3))
    with pytest.raises(ArgumentError, match=r"'table' .*\[5, 3\], .* \[20, 3\]"):
        apply_updates(TABLE, {"table": rows})


def test_ids_that_something_behind_has_computed_with_are_refused():
    """By a whole number, so that they are ids still, of other rows."""
    tx = optax.chain(lazy(optax.sgd(0.1)), optax.scale(2))

    def step(p, state, ids):
        grads = value_and_grad(square)(p, ids)[1]
        return apply_updates(p, tx.update(grads, state, p)[0])

    with pytest.raises(ArgumentError, match=r"update of 'table': the ids .* were changed"):
        jax.eval_shape(step, TABLE, tx.init(TABLE), BATCHES[0, 0])


def test_ids_that_were_changed_outside_of_jit_are_found_after_their_first_are_gone():
    """An integer factor keeps them integers: without an error, other rows change."""
    params = {"table": jnp.ones((5, 4))}
    tx = optax.chain(lazy(optax.sgd(0.1)), optax.scale(2))
    grads = {"table": RowGrads(jnp.array([1, 2]), jnp.ones((2, 4)), (5, 4))}
    updates, _ = tx.update(grads, tx.init(params), params)
    with pytest.raises(ArgumentError, match=r"update of 'table': the ids .* were changed"):
        apply_updates(params, updates)
