"""Weights of ranks in a synchronization: gradients of each kind, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors
from tests import helpers


RANKS, SHAPE, ROWS = 4, (40, 3), 5
WEIGHTS = np.array([2, 0, 1, 4], np.float32)
RULES = {".*": "sparse"}


def given():
    """Of each rank an array, entries and rows; a rank of weight 0 has a NaN in each."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=(RANKS, *shape)).astype(np.float32)
    ids = rng.integers(0, SHAPE[0], (RANKS, ROWS)).astype(np.int32)
    numbers = {"array": draw(*SHAPE), "values": draw(ROWS), "rows": draw(ROWS, SHAPE[1])}
    for x in numbers.values():
        x[1, 0] = np.nan
    return numbers | {"ids": ids}


def gradient(of):
    return {
        "array": of["array"],
        "entries": sparsejax.SparseTensor(of["ids"], of["values"], SHAPE),
        "rows": sparsejax.RowGrads.marked(of["ids"], of["rows"], SHAPE),
    }


def whole(of, rank):
    """A rank's gradients as arrays, in float64."""
    entries, rows = np.zeros(SHAPE).reshape(-1), np.zeros(SHAPE)
    np.add.at(entries, of["ids"][rank], of["values"][rank])
    np.add.at(rows, of["ids"][rank], of["rows"][rank])
    array = of["array"][rank].astype(np.float64)
    return {"array": array, "entries": entries.reshape(SHAPE), "rows": rows}


@pytest.mark.parametrize("reduce", ["mean", *helpers.slow("sum")])
@pytest.mark.parametrize("make", [sparsejax.zen_sync, sparsejax.dense_sync])
def test_each_kind_of_gradient_comes_out_as_the_weighted_mean(make, reduce):
    of, tx = given(), make(rules=RULES, reduce=reduce)
    params = {name: jnp.zeros(SHAPE) for name in ("array", "entries", "rows")}

    def on_rank(given):
        of, weight = given
        sent, _ = tx.update(gradient(of), tx.init(params), params, weight=weight)
        listed = sent["rows"]
        if isinstance(listed, sparsejax.RowGrads):
            sent["rows"] = listed.to_dense()
            flags = jnp.zeros(SHAPE[0], bool).at[listed.ids].set(True, mode="drop")
            return sent | {"listed": flags}
        return sent

    found = helpers.run_ranks(on_rank, (of, WEIGHTS), RANKS)
    helpers.assert_same_on_all_ranks(found)
    times = RANKS if reduce == "sum" else 1
    for name in params:
        parts = [w * whole(of, r)[name] for r, w in enumerate(WEIGHTS) if w]
        wanted = sum(parts) / WEIGHTS.sum() * times
        np.testing.assert_allclose(found[name][0], wanted, rtol=1e-5, atol=1e-6)
    if "listed" in found:
        ids = np.unique(of["ids"][WEIGHTS > 0])
        assert np.flatnonzero(found["listed"][0]).tolist() == ids.tolist()


def test_a_table_that_ranks_share_out_is_refused():
    mesh, tx = helpers.mesh_of(RANKS), sparsejax.dense_sync()
    table = sparsejax.ColumnTable.of(jnp.ones((6, RANKS)), mesh, "data")
    state = sparsejax.init(tx, {"table": table}, mesh)

    def on_rank(table, state):
        return tx.update({"table": table}, state, weight=1.0)[0]

    specs = sparsejax.state_specs({"table": table})["table"], P()
    mapped = helpers.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P("data"))
    with pytest.raises(errors.ArgumentError, match=r"weight=: 'table' is .*partition"):
        jax.eval_shape(mapped, table, state)


NUMBERS = r"one for each of 4 ranks, got the shape \[8\]"


@pytest.mark.parametrize("make", [sparsejax.zen_sync, sparsejax.chunked_sync])
def test_under_jit_the_shape_is_that_of_the_whole_array(make):
    """Of a sharded array each device has a part, of a shape that may be right."""
    mesh, tx = helpers.grid(replica=RANKS, fsdp=2), make("replica", reduce="sum")
    params = {"w": helpers.placed(jnp.zeros(SHAPE), mesh, P())}
    grads = {"w": helpers.partial_sums(np.ones((mesh.size, *SHAPE), np.float32), mesh)}

    def update(weight, spec):
        with jax.set_mesh(mesh):
            weight = helpers.placed(weight, mesh, spec)
            state = sparsejax.init(tx, params)
            step = lambda *args: tx.update(*args, weight=weight)[0]["w"]
            return jax.jit(step)(grads, state, params)

    whole, cut = update(WEIGHTS, P()), update(WEIGHTS, P("replica"))
    np.testing.assert_array_equal(whole, cut)
    sparsejax.check_replicas(cut)
    for spec in (P(), P("replica"), P(("replica", "fsdp"))):
        with pytest.raises(errors.ArgumentError, match=NUMBERS):
            update(np.ones(8, np.float32), spec)


def test_weights_of_examples_are_no_weights_of_ranks():
    """As many numbers as there are ranks, which differ by rank."""
    tx = sparsejax.dense_sync()
    state = tx.init({"w": jnp.zeros(RANKS)})
    update = lambda x: tx.update({"w": x}, state, weight=x)[0]
    with pytest.raises(errors.ArgumentError, match=r"4 numbers.*differ by rank.*\.sum"):
        helpers.run_ranks(update, np.ones((RANKS, RANKS), np.float32), RANKS)
