"""Arrays given by their entries: every scheme adds them up as it does dense ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
import sparsejax.wire.ladder
from sparsejax import schemes
from sparsejax.units import entries
from sparsejax.units.sparse_tensor import SparseTensor
from tests import helpers


SIZE = 3001


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Small inputs take several tiles, as large ones do."""
    monkeypatch.setattr(sparsejax.wire.ladder, "_TILE_NUMBERS", 512)


def tensors_of(x, capacity, rng, twice=False):
    """Each rank's non-zero units in an order of its own; the first one twice if wanted."""
    indices = np.full((len(x), capacity), x.shape[1], np.int32)
    values = np.ones((len(x), capacity, *x.shape[2:]), x.dtype)  # of unused entries too
    for rank, row in enumerate(x):
        units = rng.permutation(np.flatnonzero((row != 0).reshape(len(row), -1).any(1)))
        at = rng.permutation(capacity)[: len(units) + twice]
        indices[rank, at[: len(units)]] = units
        values[rank, at[: len(units)]] = row[units]
        if twice and len(units):
            indices[rank, at[-1]] = units[0]
            values[rank, at[-1]] = 1
            row[units[0]] += 1
    return indices, values


@pytest.mark.parametrize("shape", [(3,), *helpers.slow(((),))])
def test_entries_are_the_array_in_the_order_of_its_units(shape):
    rng = np.random.default_rng(0)
    x = helpers.gradients(2, SIZE, 0.1, shape=shape)
    indices, values = tensors_of(x, 400, rng, twice=True)
    for rank in range(2):
        halves = [
            SparseTensor(jnp.asarray(indices[rank]), jnp.asarray(v), (SIZE, *shape))
            for v in (values[rank], 2 * values[rank])
        ]
        laid = jax.jit(entries.of_tensors)(halves)
        assert laid.shape == (2 * SIZE, *shape)
        want = np.concatenate([x[rank], 2 * x[rank]])
        np.testing.assert_array_equal(laid.dense(), want)
        units = np.flatnonzero(np.asarray(laid.flags))
        places = laid.place(jnp.asarray(units))
        np.testing.assert_array_equal(places, np.arange(len(units)))


SCHEMES = {
    "zen": schemes.Zen(),
    "zen_bytes": schemes.Zen("bytes"),
    "balanced": schemes.BalancedParallelism(),
    "ag_sparse": schemes.AGSparse(code="auto"),
    "hierarchical": schemes.HierarchicalCentralization(),
    "omni_reduce": schemes.OmniReduce(block=32),
    "all_reduce": schemes.AllReduce(),
}


IN_SHORT = [("ag_sparse", 3, 0.05)]
REST = [
    *(("zen", 1, 0.05), ("zen", 8, 0.9)),
    *((name, 3, 0.05) for name in SCHEMES if (name, 3, 0.05) not in IN_SHORT),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n", "density"), [*IN_SHORT, *helpers.slow(*REST)])
def test_a_scheme_adds_up_entries_as_it_does_arrays(name, n, density):
    """The same bytes come out and the same bytes are sent, also where it goes densely."""
    rng = np.random.default_rng(1)
    x = helpers.gradients(n, SIZE, density)
    capacity = round(density * SIZE) + 40
    indices, values = tensors_of(x, capacity, rng, twice=True)
    tx = sparsejax.sync(SCHEMES[name], reduce="sum", rules={"": "sparse"})

    def run(x, indices, values):
        grads = {"w": SparseTensor(indices, values, (SIZE,))}
        state = tx.init({"w": jnp.zeros(SIZE)})
        total, after = tx.update(grads, state)
        dense, plain = tx.update({"w": x}, tx.init({"w": jnp.zeros(SIZE)}))
        sent = [sparsejax.metrics(s)["sync/wire_bytes"] for s in (after, plain)]
        return total["w"], dense["w"], jnp.stack(sent)

    total, dense, sent = helpers.ranked(run, n)(x, indices, values)
    helpers.assert_same_on_all_ranks(total)
    np.testing.assert_array_equal(total[0], helpers.total(x))
    assert total.tobytes() == dense.tobytes()
    assert (sent[:, 0] == sent[:, 1]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "every"), [("ag_sparse", 2), *helpers.slow(("zen", 2))])
def test_sparse_and_dense_leaves_go_together(name, every):
    """Beside dense leaves, in rows, in 16 bits, accumulated: the gradient is the same."""
    n, rows = 3, 300
    rng = np.random.default_rng(2)
    w = helpers.gradients(n, SIZE, 0.05)
    table = helpers.gradients(n, rows, 0.1, np.float16, shape=(4,))
    params = {"w": jnp.zeros(SIZE), "embedding": jnp.zeros((rows, 4), jnp.float16)}
    params["b"] = jnp.zeros(SIZE)
    at, values = tensors_of(w, 200, rng)
    row_at, row_values = tensors_of(table, 50, rng)
    tx = sparsejax.sync(SCHEMES[name], reduce="sum", rules={"": "sparse"})
    tx = sparsejax.accumulate(tx, every, reduce="sum")

    def run(w, at, values, row_at, row_values):
        grads = {
            "w": SparseTensor(at, values, (SIZE,)),
            "embedding": SparseTensor(row_at, row_values, (rows, 4)),
            "b": w,
        }
        state = tx.init(params)
        for _ in range(every):
            total, state = tx.update(grads, state)
        return total

    total = helpers.ranked(run, n)(w, at, values, row_at, row_values)
    helpers.assert_same_on_all_ranks(total)
    for name, x in (("w", w), ("b", w), ("embedding", table)):
        np.testing.assert_array_equal(total[name][0], every * helpers.total(x))


def test_shared_indices_do_not_travel():
    """Where all ranks have the same indices what is sent is an all-reduce of the values."""
    n, capacity = 8, 256
    at = np.random.default_rng(3).permutation(SIZE)[:capacity].astype(np.int32)
    values = np.arange(n * capacity, dtype=np.float32).reshape(n, capacity)
    tx = optax.chain(sparsejax.zen_sync(reduce="sum", rules={"": "sparse"}))

    def run(values):
        grads = {"w": SparseTensor(jnp.asarray(at), values[0], (SIZE,), shared=True)}
        state = tx.init({"w": jnp.zeros(SIZE)})
        total, state = tx.update(grads, state)
        return total["w"], sparsejax.metrics(state)["sync/wire_bytes"]

    step = jax.jit(
        helpers.shard_map(
            run, mesh=helpers.mesh_of(n), in_specs=P(helpers.AXIS), out_specs=P()
        )
    )
    total, sent = step(values)
    want = np.zeros(SIZE)
    want[at] = values.sum(0)
    np.testing.assert_array_equal(total, want)
    assert sent == 2 * (n - 1) / n * 4 * capacity


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "shape"),
    [
        (schemes.AGSparse(), (SIZE,)),
        # A matrix is a bucket of its own, of which nothing else differs by rank.
        (schemes.BalancedParallelism(), (1023, 4)),
    ],
)
def test_a_tensor_without_room_for_an_entry_is_a_zero(scheme, shape):
    n = 2
    tx = sparsejax.sync(scheme, reduce="sum", rules={"": "sparse"})
    params = {"w": jnp.zeros(shape), "b": jnp.zeros(40)}

    def run(values, b):
        empty = SparseTensor(jnp.zeros(0, jnp.int32), values, shape)
        return tx.update({"w": empty, "b": b}, tx.init(params))[0]

    b = np.arange(40 * n, dtype=np.float32).reshape(n, 40)
    total = helpers.ranked(run, n)(np.zeros((n, 0), np.float32), b)
    helpers.assert_same_on_all_ranks(total)
    np.testing.assert_array_equal(total["b"][0], b.sum(0))
    assert not total["w"].any()
