"""What XLA compiles of a round: gradient and residual are added up once."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax


SIDE, LEAVES = 512, 2


@pytest.mark.slow
def test_a_round_holds_the_gradient_with_its_residual_once():
    # It is read by the selection, by the values and by the next residual. XLA would add it
    # up for each of them, and hold 14.7 bytes a number. One array of float32 has 4.
    leaves = [jnp.ones((SIDE, SIDE))] * LEAVES
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    tx = sparsejax.chunked_sync(decay=0.95, via="all_gather")
    state = sparsejax.init(tx, leaves, mesh)
    specs = sparsejax.state_specs(state)

    def update(params, state, moved):
        updates, state = tx.update(moved, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        update,
        mesh=mesh,
        in_specs=(P(), specs, P()),
        out_specs=(P(), specs),
        check_vma=False,
    )
    step = jax.jit(mapped, donate_argnums=(0, 1)).lower(leaves, state, leaves).compile()
    held = step.memory_analysis().temp_size_in_bytes
    assert held <= 10 * LEAVES * SIDE * SIDE
