"""Rows are held back in models of flax, on other meshes, and beside blocks, too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sparsejax
from sparsejax.embrace import ColumnTable, column_lookup, horizontal, lookahead, rows_held
from sparsejax.embrace.nnx import Embed
from tests.helpers import grid, mesh_of


ROWS, DIM = 30, 5
BATCHES = np.random.default_rng(0).integers(0, ROWS, (3, 24)).astype(np.int32)
LAZY = sparsejax.lazy(optax.adam(0.1), exact=False)


def entropy(logits, ids):
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids % 4).mean()


def of_nnx():
    """On a mesh with another axis."""
    mesh, rngs = grid(data=2, model=2), nnx.Rngs(0)
    embed = Embed(ROWS, DIM, mesh, "data", rngs=rngs)
    graph, params = nnx.split(nnx.Sequential(embed, nnx.Linear(DIM, 4, rngs=rngs)))
    loss_fn = lambda params, ids: entropy(nnx.merge(graph, params)(ids), ids)
    return loss_fn, params, mesh, "data"


def by_hand(mesh, axis_name, dtype=np.float32):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(ROWS, DIM)).astype(dtype)
    params = {"table": ColumnTable.of(table, mesh, axis_name)}
    params["first"] = rng.normal(size=(DIM, DIM)).astype(dtype)
    params["kernel"] = rng.normal(size=(DIM, 4)).astype(dtype)

    def loss_fn(params, ids):
        hidden = jnp.tanh(column_lookup(params["table"], ids) @ params["first"])
        return entropy(hidden @ params["kernel"], ids)

    return loss_fn, params, mesh, axis_name


KINDS = {
    "nnx, beside another axis": of_nnx,
    "blocks are carried": lambda: by_hand(mesh_of(2), "data"),
    "over two axes, in bfloat16": lambda: by_hand(
        grid(data=2, model=2), ("data", "model"), jnp.bfloat16
    ),
}


def trained(kind, vertical):
    """The losses, those of evaluations, rows held back, and the parameters after a flush.

    Where blocks are carried, those without a schedule carry none.
    """
    loss_fn, params, mesh, axis_name = KINDS[kind]()
    sync = sparsejax.embrace_sync(axis_name, vertical=vertical, delayed=4)
    tx = optax.chain(sync, LAZY)
    if kind == "blocks are carried":
        which = lambda params: {k: "rows" if k == "table" else "rest" for k in params}
        each = {"rows": LAZY, "rest": optax.adam(1e-2)}
        tx = optax.chain(sync, optax.partition(each, which))
        tx = horizontal(tx) if vertical else tx
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh, axis_name=axis_name)
    state, losses, seen, held = trainer.init(params), [], [], []
    for ids, following in lookahead(BATCHES):
        state, loss = trainer.step(state, ids, *((following,) if vertical else ()))
        losses.append(float(loss))
        held.append(sum(int(x.sum()) for x in rows_held(state.opt_state).values()))
        seen.append(float(trainer.evaluate(state, BATCHES[0])))
    state = trainer.flush(state) if vertical else state
    return losses, seen, held, jax.tree.leaves(state.params)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_training_without_a_schedule(kind):
    losses, seen, held, params = trained(kind, vertical=True)
    want, wanted, _, whole = trained(kind, vertical=False)
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    np.testing.assert_allclose(seen, wanted, rtol=1e-5)
    assert losses[-1] < losses[0]
    assert min(held[:-1]) > 0
    assert held[-1] == 0
    for ours, theirs in zip(params, whole, strict=True):
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
