"""Modules of flax with tables by columns train as those with whole tables do."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.embrace import ColumnTable, linen as of_linen, nnx as of_nnx
from sparsejax.state import sharded, tree
from tests.helpers import mesh_of, placed, shard_map


ROWS, DIM = 30, 5
MESH = mesh_of(2)
BATCH = np.random.default_rng(0).integers(0, ROWS, 24).astype(np.int32)


def entropy(logits, ids):
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids % 4).mean()


def trained(step, state, specs, steps=3):
    """The losses of some steps, and the last state."""
    mapped = jax.jit(
        shard_map(
            step, mesh=MESH, in_specs=(specs, P("data")), out_specs=(specs, P("data"))
        )
    )
    losses = []
    state, ids = placed((state, BATCH), MESH, (specs, P("data")))
    for _ in range(steps):
        state, loss = mapped(state, ids)
        losses.append(np.asarray(loss))
    return np.mean(losses, axis=1), state


class LinenModel(linen.Module):
    sharded: bool

    @linen.compact
    def __call__(self, ids):
        kind = functools.partial(of_linen.ColumnEmbed, mesh=MESH)
        embed = (kind if self.sharded else linen.Embed)(ROWS, DIM, name="embed")
        return linen.Dense(4, name="dense")(embed(ids))


@functools.cache
def of_linen_model(sharded):
    """The parameters at first, the losses, and the table at last."""
    tx = sparsejax.bind(optax.chain(sparsejax.zen_sync(), optax.adam(0.1)), MESH)
    model = LinenModel(sharded)
    params = model.init(jax.random.key(1), BATCH)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state, ids):
        loss_fn = lambda params: entropy(state.apply_fn(params, ids), ids)
        loss, grads = jax.value_and_grad(loss_fn)(sparsejax.local(state.params))
        return state.apply_gradients(grads=grads), loss[None]

    losses, state = trained(step, state, sparsejax.state_specs(state))
    return params["params"], losses, state.params["params"]["embed"]["embedding"]


@pytest.mark.filterwarnings("ignore:sparsejax.column_lookup of a table")
@pytest.mark.slow
def test_linen():
    _, losses, table = of_linen_model(sharded=True)
    _, want, whole = of_linen_model(sharded=False)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert table.value.addressable_shards[0].data.shape == (ROWS, 3)
    np.testing.assert_allclose(table.whole(), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_nnx_by_rows():
    """Rows that each step reads are those of the dense run; others stay as they were."""
    params, want, whole = of_linen_model(sharded=False)
    rngs = nnx.Rngs(0)
    embed = of_nnx.Embed(ROWS, DIM, MESH, rngs=rngs)
    model = nnx.Sequential(embed, nnx.Linear(DIM, 4, rngs=rngs))
    first = params["embed"]["embedding"]
    embed.embedding.set_value(ColumnTable.of(first, MESH))
    model.layers[1].kernel.set_value(params["dense"]["kernel"])
    adam = sparsejax.lazy(optax.adam(0.1), exact=False)
    tx = sparsejax.bind(optax.chain(sparsejax.zen_sync(), adam), MESH)
    optimizer = of_nnx.Optimizer(model, tx, wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state, ids):
        model, optimizer = nnx.merge(graph, state)
        inside, params = nnx.split(model, nnx.Param)
        loss_fn = lambda params: entropy(nnx.merge(inside, params)(ids), ids)
        loss, grads = sparsejax.value_and_grad(loss_fn)(sparsejax.local(params))
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss[None]

    losses, state = trained(step, state, sparsejax.state_specs(state))
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    table = np.asarray(state[0]["layers"][0]["embedding"].get_value().whole())
    read = np.isin(np.arange(ROWS), BATCH)
    assert not read.all()
    np.testing.assert_allclose(table[read], whole[read], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(table[~read], first[~read])


def test_a_table_in_a_model_of_nnx_has_one_path():
    """As a node and as its array: `nnx.Param` and the table end in a `.value` each."""
    embed = of_nnx.Embed(ROWS, DIM, MESH, rngs=nnx.Rngs(0))
    params = nnx.state(nnx.Sequential(embed, lambda x: x), nnx.Param)
    assert sharded.apart(params).paths == tree.flatten(params)[0] == ["layers/0/embedding"]
