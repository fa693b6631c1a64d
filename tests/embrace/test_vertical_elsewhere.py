"""Rows are held back in models of flax, on other meshes and of tables in bfloat16, too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import sparsejax
from sparsejax.embrace import ColumnTable, column_lookup, lookahead, rows_held
from sparsejax.embrace.linen import ColumnEmbed as LinenEmbed
from sparsejax.embrace.nnx import Embed as NnxEmbed
from tests.helpers import grid, mesh_of


ROWS, DIM = 30, 5
BATCHES = np.random.default_rng(0).integers(0, ROWS, (3, 24)).astype(np.int32)
LAZY = sparsejax.lazy(optax.adam(0.1), exact=False)


def entropy(logits, ids):
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids % 4).mean()


def of_linen():
    mesh = mesh_of(2)

    class Model(linen.Module):
        @linen.compact
        def __call__(self, ids):
            return linen.Dense(4)(LinenEmbed(ROWS, DIM, mesh)(ids))

    model = Model()
    params = model.init(jax.random.key(1), BATCHES[0])
    loss_fn = lambda params, ids: entropy(model.apply(params, ids), ids)
    return loss_fn, params, mesh, "data"


def of_nnx():
    """The model of linen, with its parameters."""
    mesh, rngs = mesh_of(2), nnx.Rngs(0)
    embed = NnxEmbed(ROWS, DIM, mesh, rngs=rngs)
    graph, params = nnx.split(nnx.Sequential(embed, nnx.Linear(DIM, 4, rngs=rngs)))
    _, same, _, _ = of_linen()
    params = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(same))
    loss_fn = lambda params, ids: entropy(nnx.merge(graph, params)(ids), ids)
    return loss_fn, params, mesh, "data"


def by_hand(mesh, axis_name, dtype=np.float32):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(ROWS, DIM)).astype(dtype)
    params = {"table": ColumnTable.of(table, mesh, axis_name)}
    params["kernel"] = rng.normal(size=(DIM, 4)).astype(dtype)

    def loss_fn(params, ids):
        return entropy(column_lookup(params["table"], ids) @ params["kernel"], ids)

    return loss_fn, params, mesh, axis_name


KINDS = {
    "linen": of_linen,
    "nnx": of_nnx,
    "beside another axis": lambda: by_hand(grid(data=2, model=2), "data"),
    "over two axes, in bfloat16": lambda: by_hand(
        grid(data=2, model=2), ("data", "model"), jnp.bfloat16
    ),
}


# The same training, so one run without a schedule serves both.
SAME = {"nnx": "linen"}


@functools.cache
def trained(kind, vertical):
    """The losses, how many rows were held back, and the last parameters."""
    loss_fn, params, mesh, axis_name = KINDS[kind]()
    sync = sparsejax.embrace_sync(axis_name, vertical=vertical, delayed=4)
    tx = optax.chain(sync, LAZY)
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh, axis_name=axis_name)
    state, losses, held = trainer.init(params), [], []
    for ids, following in lookahead(BATCHES):
        state, loss = trainer.step(state, ids, *((following,) if vertical else ()))
        losses.append(float(loss))
        held.append(sum(int(x.sum()) for x in rows_held(state.opt_state).values()))
    return losses, held, jax.tree.leaves(state.params)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_training_without_a_schedule(kind):
    losses, held, params = trained(kind, vertical=True)
    want, _, whole = trained(SAME.get(kind, kind), vertical=False)
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    assert losses[-1] < losses[0]
    assert min(held[:-1]) > 0
    assert held[-1] == 0
    for ours, theirs in zip(params, whole, strict=True):
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
