"""A trainer that compares its state over the ranks at every so many steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.errors import ArgumentError, ReplicaError
from sparsejax.training import train_state
from tests import helpers
from tests.monitor.test_replicas import flipped, placed


N = 3
BATCH = np.ones(N, np.float32)


def loss_fn(params, batch, *, variables, key):
    del key
    return jnp.mean(params["w"]) * batch.mean(), variables


@functools.cache
def trainer():
    tx = optax.chain(
        sparsejax.top_k(0.5, min_size=1), sparsejax.dense_sync(), optax.adam(0.1)
    )
    mesh = helpers.mesh_of(N)
    return sparsejax.data_parallel(loss_fn, tx, mesh, donate=False, check_every=2)


def first():
    params, seen = {"w": np.ones(4, np.float32)}, {"seen": np.float32(1)}
    return trainer().init(params, variables=seen, key=jax.random.key(0))


def apart(x, rank=1):
    """x with another bit on one rank."""
    copies = [flipped(x, 0) if i == rank else np.asarray(x) for i in range(N)]
    return placed(helpers.mesh_of(N), P(), copies)


def of_params(state):
    return state._replace(params={"w": apart(state.params["w"])})


def of_optimizer(state):
    paths, structure = jax.tree_util.tree_flatten_with_path(state.opt_state)
    leaves = [
        apart(leaf) if "nu" in jax.tree_util.keystr(keys) else leaf for keys, leaf in paths
    ]
    return state._replace(opt_state=structure.unflatten(leaves))


def of_variables(state):
    return state._replace(variables={"seen": apart(state.variables["seen"])})


CHANGES = [
    (of_params, "'params/w'"),
    (of_optimizer, "'opt_state/2/0/nu/w'"),
    (of_variables, "'variables/seen'"),
]


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_ranks_that_differ_are_found_before_the_next_step_that_is_due(change, name):
    state = first()
    for _ in range(2):
        state, _ = trainer().step(state, BATCH)
    # The state of step 2 is compared; what becomes wrong behind it is found at step 4.
    state, _ = trainer().step(state, BATCH)
    state = change(state)
    wrong = state
    state, _ = trainer().step(state, BATCH)
    state = state._replace(params=wrong.params, variables=wrong.variables)
    state = state._replace(opt_state=wrong.opt_state)
    match = rf"(?s)before step 4: .*{name}: rank 1 \(cpu:1\) differs from the other 2"
    with pytest.raises(ReplicaError, match=match):
        trainer().step(state, BATCH)


def test_steps_are_counted_without_reading_the_device(monkeypatch):
    state, _ = trainer().step(first(), BATCH)
    monkeypatch.setattr(train_state, "np", None)
    for _ in range(4):
        state, _ = trainer().step(state, BATCH)
    wrong = of_params(state)  # of step 5: it is not due
    with pytest.raises(AttributeError):
        trainer().step(wrong._replace(step=wrong.step + 0), BATCH)


def test_a_state_that_was_restored_is_compared_before_its_first_step():
    state, _ = trainer().step(first(), BATCH)
    restored = state._replace(step=state.step + 0)
    trainer().step(restored, BATCH)
    wrong = of_params(state)._replace(step=state.step + 0)
    with pytest.raises(ReplicaError, match="before step 1"):
        trainer().step(wrong, BATCH)
    # From NumPy arrays all ranks get the same.
    saved = jax.tree.map(np.asarray, state._replace(key=None))._replace(key=state.key)
    again, _ = trainer().step(saved, BATCH)
    assert int(again.step) == 2


def test_residuals_that_differ_by_rank_are_no_difference():
    state = first()
    for step in range(3):
        batch = BATCH * np.arange(step, step + N, dtype=np.float32)
        state, _ = trainer().step(state, batch)
    residual = np.asarray(sparsejax.residuals(state.opt_state)["w"])
    assert residual[0].tobytes() != residual[1].tobytes()
    trainer().step(state._replace(step=state.step + 0), BATCH)


def test_a_number_of_steps_is_positive():
    with pytest.raises(ArgumentError, match="check_every must be a positive int or None"):
        sparsejax.data_parallel(loss_fn, optax.sgd(1.0), helpers.mesh_of(2), check_every=0)
