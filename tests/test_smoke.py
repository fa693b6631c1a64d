"""A minute's worth of the main road, for a JAX that is newer than the one tested fully."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import schemes
from tests import helpers
from tests.helpers import assert_same_on_all_ranks, gradients, mesh_of, ranked, total


@pytest.mark.parametrize(
    "scheme",
    [schemes.BalancedParallelism(), schemes.HierarchicalCentralization()],
    ids=["balanced", "hierarchical"],
)
def test_schemes_are_exact_and_equal_on_all_ranks(scheme):
    n = 3
    run = ranked(lambda x: helpers.call(scheme, x).total, n)
    for density in (0, 0.01, 0.2, 1):
        x = gradients(n, 2003, density)
        got = run(x)
        np.testing.assert_array_equal(got[0], total(x))
        assert_same_on_all_ranks(got)


def test_zen_sync_in_a_chain():
    tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))
    params = {"embedding": jnp.ones((8192, 8)), "bias": jnp.ones(3)}
    state = sparsejax.init(tx, params, mesh_of(4))
    specs = sparsejax.state_specs(state)

    def step(x, state):
        grads = jax.tree.map(lambda p: p * x[0], sparsejax.local(params))
        grads["embedding"] = grads["embedding"].at[100:].set(0)
        return tx.update(grads, state, params)

    step = helpers.shard_map(
        step, mesh=mesh_of(4), in_specs=(P("data"), specs), out_specs=(P(), specs)
    )
    updates, state = jax.jit(step)(jnp.arange(4.0), state)
    np.testing.assert_allclose(updates["embedding"][:100], -1e-3, rtol=1e-4)
    assert float(jnp.abs(updates["embedding"][100:]).max()) == 0
    metrics = sparsejax.metrics(state)
    assert float(metrics["sync/wire_bytes"]) < 0.1 * float(metrics["sync/dense_bytes"])


def test_checkpoint_specs_tell_what_differs_by_rank():
    tx = sparsejax.accumulate(sparsejax.zen_sync(), every=2)
    state = sparsejax.init(tx, {"w": jnp.ones(3)}, mesh_of(4))
    assert state.pending.value["w"].shape == (4, 3)
    assert sparsejax.state_specs(state).pending.value["w"] == P("data")
    assert sparsejax.state_specs(state).step == P()
