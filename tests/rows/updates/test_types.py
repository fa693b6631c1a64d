"""Rows of tables of which one is the same on all ranks, and another one is not."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.axes import varying_axes
from tests import helpers
from tests.helpers import mesh_of, shard_map


HEIGHT, LONG = 20_000, 8192


@pytest.mark.parametrize("listed", [0, *helpers.slow(LONG)])
def test_what_is_the_same_on_all_ranks_stays_so_beside_shards(listed):
    """Whole tables catch up in a loop, long lists are worked on in one: not in the same."""
    tx = sparsejax.lazy(optax.adam(1e-2))
    params = {name: jnp.zeros((HEIGHT, 32)) for name in ("same", "shard")}
    types = []

    def on_rank(params):
        grads = params
        if listed:
            ids = jnp.arange(listed, dtype=jnp.int32)
            grads = {
                name: sparsejax.RowGrads.marked(ids, x[:listed], x.shape)
                for name, x in params.items()
            }
        updates, state = tx.update(grads, tx.init(params), params)
        leaves = jax.tree_util.tree_leaves_with_path((updates, state))
        types.extend((jax.tree_util.keystr(keys), varying_axes(x)) for keys, x in leaves)
        return 0

    specs = ({"same": P(), "shard": P(None, "data")},)
    run = shard_map(on_rank, mesh=mesh_of(2), in_specs=specs, out_specs=P())
    jax.eval_shape(run, params | {"shard": jnp.zeros((HEIGHT, 64))})
    differ = {name for name, varies in types if varies}
    assert {name for name in differ if "'shard'" in name} == differ
    assert not any(word in name for name in differ for word in ("last", "ids", "step"))
    assert len(differ) == 3  # the update, and what Adam keeps
