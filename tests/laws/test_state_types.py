"""A step leaves a state of the types that it was given: else the next compiles again."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import sparsifiers, transforms
from tests import helpers


PARAMS = {"large": jnp.zeros(70_000), "small": jnp.zeros(3)}
REUSE = sparsejax.sparsify(sparsifiers.ReuseThreshold(0.01))
SYNCS = {
    "zen": sparsejax.zen_sync(),
    "power_sgd": sparsejax.transforms.power_sgd_sync(2),
    "spardl": sparsejax.spardl_sync(0.01),
    "ok_topk": sparsejax.ok_topk_sync(0.01),
    "chunked": sparsejax.chunked_sync(),
    "gtopk": transforms.gtopk_sync(0.01),
    "gaussian_k": transforms.gaussian_k_sync(0.01),
    "reuse": optax.chain(REUSE, sparsejax.zen_sync()),
    "dgc": optax.chain(
        sparsejax.dgc(0.01, memory=sparsejax.MomentumCorrection(0.9)), sparsejax.zen_sync()
    ),
}


@pytest.mark.parametrize("sync", helpers.mostly_slow(SYNCS, "zen", "dgc"))
def test_a_state_has_the_same_types_after_a_step(sync):
    """Weak types, too: `jax.jit` tells them apart."""
    tx, mesh = SYNCS[sync], helpers.mesh_of(3)
    state = sparsejax.init(tx, PARAMS, mesh)
    specs = sparsejax.state_specs(state)

    def update(grads, state):
        return tx.update(sparsejax.local(grads, "data"), state)[1]

    step = helpers.shard_map(update, mesh=mesh, in_specs=(P(), specs), out_specs=specs)
    after = jax.eval_shape(step, PARAMS, state)
    assert types(after) == types(state)


def types(state):
    paths = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path): (x.shape, x.dtype, x.weak_type) for path, x in paths
    }
