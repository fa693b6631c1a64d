"""`data_parallel` with a lazy optimizer: the dense run, by rows."""

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import sparsejax
from sparsejax import rows
from tests.helpers import mesh_of
from tests.training.test_by_rows import PARAMS, batch_of, loss_fn


@pytest.mark.slow
def test_a_lazy_run_is_the_dense_run():
    lazy = rows.lazy(optax.adam(1e-2))
    tx = optax.chain(sparsejax.zen_sync(), lazy)
    dense = optax.chain(sparsejax.dense_sync(), optax.adam(1e-2))
    weight = lambda batch: batch["mask"].sum()
    trainers = [
        sparsejax.data_parallel(loss_fn, each, mesh_of(2), weight=weight)
        for each in (tx, dense)
    ]
    states = [trainer.init(PARAMS) for trainer in trainers]
    for step in range(5):
        batch = batch_of(step % 4, 2)
        both = [t.step(s, batch) for t, s in zip(trainers, states, strict=True)]
        states, losses = zip(*both, strict=True)
        np.testing.assert_allclose(*losses, rtol=1e-5)
    batch = batch_of(9, 2)
    found = [t.evaluate(s, batch) for t, s in zip(trainers, states, strict=True)]
    np.testing.assert_allclose(*found, rtol=1e-5)
    late = jax.tree.map(np.asarray, states[0].params)
    settle = jax.jit(rows.settle, static_argnums=2)
    settled, _ = settle(states[0].params, states[0].opt_state, lazy)
    for name, want in states[1].params.items():
        np.testing.assert_allclose(settled[name], want, rtol=1e-5, atol=1e-6)
    assert np.abs(late["users"] - states[1].params["users"]).max() > 1e-4


@pytest.mark.slow
def test_a_checkpoint_goes_on_as_the_dense_run_does_on_other_ranks(tmp_path):
    """Tables, moments and which rows are late all come back, for two ranks of four."""
    lazy = rows.lazy(optax.adam(1e-2))
    by_rows = optax.chain(sparsejax.zen_sync(), lazy)
    dense = optax.chain(sparsejax.dense_sync(), optax.adam(1e-2))
    weight = lambda batch: batch["mask"].sum()

    def run(tx, mesh, steps, state=None):
        trainer = sparsejax.data_parallel(loss_fn, tx, mesh, weight=weight)
        state = trainer.init(PARAMS) if state is None else state
        for step in steps:
            state, _ = trainer.step(state, batch_of(step, 4))
        return state

    two = mesh_of(2)
    saved = run(by_rows, mesh_of(4), range(3))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        fresh = sparsejax.data_parallel(loss_fn, by_rows, two).init(PARAMS)
        target = sparsejax.abstract_state(by_rows, PARAMS, two, ranks=4)
        state = checkpointer.restore(tmp_path / "state", fresh._replace(opt_state=target))
    opt_state = sparsejax.resized(state.opt_state, like=fresh.opt_state)
    state = run(by_rows, two, range(3, 6), state._replace(opt_state=opt_state))
    settled, _ = rows.settle(state.params, state.opt_state, lazy)
    want = run(dense, two, range(6)).params
    for name, values in want.items():
        np.testing.assert_allclose(settled[name], values, rtol=1e-5, atol=1e-6)
