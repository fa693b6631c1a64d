"""`data_parallel` with a lazy optimizer: the dense run, by rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import rows
from sparsejax.errors import StateError
from sparsejax.rows.updates.state import LazyState
from sparsejax.state.per_rank import find
from tests import helpers
from tests.helpers import mesh_of
from tests.training.test_by_rows import PARAMS, batch_of, loss_fn


LAZY = rows.lazy(optax.adam(1e-2))
BY_ROWS = optax.chain(sparsejax.zen_sync(), LAZY)
DENSE = optax.chain(sparsejax.dense_sync(), optax.adam(1e-2))


SAVED, STEPS = 3, 6


def run(tx, ranks, steps, state=None):
    """A trainer on so many ranks, its state after some steps, and their losses.

    The batches are those of four ranks.
    """
    weight = lambda batch: batch["mask"].sum()
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh_of(ranks), weight=weight)
    state = trainer.init(PARAMS) if state is None else state
    losses = []
    for step in steps:
        state, loss = trainer.step(state, batch_of(step, 4))
        losses.append(float(loss))
    return trainer, state, losses


@pytest.mark.slow
def test_a_checkpoint_goes_on_as_the_dense_run_does_on_other_ranks(tmp_path):
    """Tables, moments, and which rows are late all come back, on half of the ranks.

    Steps and evaluations read late rows as they are once they have caught up.
    """
    (_, saved, _), mesh = run(BY_ROWS, 4, range(SAVED)), mesh_of(2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "rows", saved)
        checkpointer.wait_until_finished()
        fresh = sparsejax.data_parallel(loss_fn, BY_ROWS, mesh).init(PARAMS)
        target = sparsejax.abstract_state(BY_ROWS, PARAMS, mesh, ranks=4)
        target = fresh._replace(opt_state=target)
        state = checkpointer.restore(tmp_path / "rows", target)
    for name, leaf in saved.params.items():  # late as they were, and not settled
        np.testing.assert_array_equal(state.params[name], leaf)
    opt_state = sparsejax.resized(state.opt_state, like=fresh.opt_state)
    (lazy,) = find(opt_state, LazyState)
    assert int(lazy.step) == SAVED
    assert {*np.unique(lazy.last["items"])} == {*range(SAVED + 1)}
    state = state._replace(opt_state=opt_state)
    ours, state, losses = run(BY_ROWS, 2, range(SAVED, STEPS), state)
    dense, want, wanted = run(DENSE, 2, range(STEPS))
    np.testing.assert_allclose(losses, wanted[SAVED:], rtol=1e-5)
    found = [t.evaluate(s, batch_of(9, 4)) for t, s in ((ours, state), (dense, want))]
    np.testing.assert_allclose(*found, rtol=1e-5)
    settled, _ = rows.settle(state.params, state.opt_state, LAZY)
    for path, values in want.params.items():
        np.testing.assert_allclose(settled[path], values, rtol=1e-5, atol=1e-6)
    late = np.asarray(state.params["items"])
    assert np.abs(late - want.params["items"]).max() > 1e-4


# Whether an optimizer is taken where a second mesh axis shards a table by columns.
OF_COLUMNS = {
    "adam": (optax.adam(1e-2), True, False),
    "adam, not exact": (optax.adam(1e-2), False, True),
    "momentum": (optax.sgd(0.1, momentum=0.9), True, False),
    "rmsprop": (optax.rmsprop(1e-2), True, False),
    "adagrad": (optax.adagrad(0.1), True, True),
}


@pytest.mark.parametrize("name", OF_COLUMNS)
def test_columns_of_a_second_axis_need_an_optimizer_that_leaves_unread_rows_alone(name):
    """Their state, too: which rows are late is no array of a parameter's shape."""
    inner, exact, is_taken = OF_COLUMNS[name]
    tx = optax.chain(sparsejax.zen_sync("data"), rows.lazy(inner, exact=exact))
    mesh, specs = helpers.grid(data=2, model=2), {"table": P(None, "model")}
    init = lambda: sparsejax.init(
        tx, {"table": jnp.ones((40, 8))}, mesh, "data", param_specs=specs
    )
    if is_taken:
        assert jax.tree.leaves(init())
        return
    with pytest.raises(
        StateError, match=r"last/table' .*\[40\].*sharded P\(None, 'model'\)"
    ):
        init()


@pytest.mark.slow  # as one of rows/updates/test_in_place.py
def test_a_train_step_has_nothing_of_the_tables_size_beside_table_and_state():
    """From the loss to the parameters, of 10M rows; compiled for shapes alone.

    Both where rows fit into the capacity and where they do not.
    """
    whole = (10_000_000, 16)
    shaped = lambda shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    params = {"table": shaped(whole), "kernel": shaped((whole[1], 4))}

    def loss_fn(params, ids):
        return jnp.mean(jnp.tanh(params["table"][ids] @ params["kernel"]) ** 2)

    trainer = sparsejax.data_parallel(loss_fn, BY_ROWS, mesh_of(4), capacity=256)
    opt_state = jax.eval_shape(BY_ROWS.init, params)
    state = sparsejax.TrainState(shaped((), jnp.int32), params, opt_state, None, None)
    lowered = trainer.compiled(state).lower(state, shaped((4 * 1024,), jnp.int32))
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    # The smallest array of the table's height is one number a row.
    assert memory.temp_size_in_bytes < 4 * whole[0]
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert held > 3 * 4 * whole[0] * whole[1]
    assert memory.alias_size_in_bytes > 0.999 * held
    assert memory.output_size_in_bytes < 1.001 * held
    assert not re.findall(rf"= \w+\[{whole[0]}[^=]*copy\(.*", compiled.as_text())
