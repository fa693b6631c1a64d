"""`RowGrads` through `sync`: from a loss that reads tables to one mean on all ranks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors, rows, schemes
from sparsejax.schemes import two_level
from sparsejax.units.row_grads import RowGrads, is_row_grads
from tests import helpers


RANKS = 2
PARAMS = {
    "users": jnp.ones((6_000, 12)),
    "items": jnp.ones((9_000, 8)),
    "days": jnp.ones((7, 12)),
    "kernel": jnp.ones((12, 8)),
}
TX = sparsejax.zen_sync()
RNG = np.random.default_rng(0)
BATCH = {
    "users": RNG.integers(0, 6_000, (RANKS, 40)).astype(np.int32),
    "items": np.minimum(RNG.zipf(1.3, (RANKS, 40)), 9_000).astype(np.int32) - 1,
}


def loss_fn(params, batch):
    days = params["days"][batch["users"] % 3]
    hidden = (params["users"][batch["users"]] + days) @ params["kernel"]
    score = (hidden * params["items"][batch["items"]]).sum(-1)
    return jnp.mean((score - batch["items"]) ** 2) / 1e6


def on_ranks(function, n=RANKS, **options):
    """From arrays by rank to what all ranks have."""
    mesh = options.pop("mesh", None) or helpers.mesh_of(n)
    specs = {"in_specs": P("data"), "out_specs": P(), **options}
    return jax.jit(helpers.shard_map(function, mesh=mesh, **specs))


def grads_of(batch, params=PARAMS):
    """The gradients of one rank."""
    own = jax.tree.map(lambda x: x[0], batch)
    return rows.value_and_grad(loss_fn)(sparsejax.local(params), own)[1]


TALL = (20_000, 4)


def traced(tx, after=lambda updates: updates):
    """The types of what an update makes of one rank's rows of a table."""
    state = sparsejax.init(tx, {"table": jnp.zeros(TALL)}, helpers.mesh_of(2))

    def update(x, state):
        ids = jnp.zeros(5, jnp.int32) + x.astype(jnp.int32)
        grads = {"table": RowGrads.marked(ids, jnp.zeros((5, 4)) + x, TALL)}
        return after(tx.update(grads, state)[0])

    specs = P("data"), sparsejax.state_specs(state)
    return jax.eval_shape(on_ranks(update, 2, in_specs=specs), jnp.zeros(2), state)


@pytest.mark.slow
def test_the_mean_of_a_model_with_tables():
    """Tables come back as rows, what is small or no table as arrays; all is the mean."""
    state = TX.init(PARAMS)

    def step(batch):
        updates, after = TX.update(grads_of(batch), state)
        return updates, sparsejax.metrics(after), after

    updates, numbers, after = on_ranks(step)(BATCH)
    kinds = {name: is_row_grads(leaf) for name, leaf in updates.items()}
    assert kinds == {"users": True, "items": True, "days": False, "kernel": False}

    def mean_loss(params):
        split = [jax.tree.map(lambda x, i=i: x[i], BATCH) for i in range(RANKS)]
        return sum(loss_fn(params, batch) for batch in split) / RANKS

    want = jax.grad(mean_loss)(PARAMS)
    for name, leaf in updates.items():
        got = leaf.to_dense() if is_row_grads(leaf) else leaf
        np.testing.assert_allclose(got, want[name], rtol=1e-5, atol=1e-6, err_msg=name)
        assert got.dtype == PARAMS[name].dtype
    for name in ("users", "items"):
        ids = np.asarray(updates[name].ids)
        real = ids[ids < PARAMS[name].shape[0]]
        assert sorted(real) == sorted(set(BATCH[name].ravel()))
    # One state for dense gradients and for rows, and nothing of a table's size in it.
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert sum(x.size for x in jax.tree.leaves(after)) < 200
    # Both tables share the metrics of the bucket in which they would be as arrays.
    both = numbers["sync/items and 1 more/wire_bytes"]
    assert numbers["sync/wire_bytes"] == both + numbers["sync/days and 1 more/wire_bytes"]
    dense = [2 * (RANKS - 1) / RANKS * 4 * leaf.size for leaf in PARAMS.values()]
    np.testing.assert_allclose(numbers["sync/dense_bytes"], sum(dense), rtol=1e-6)
    assert 0 < both < 0.1 * numbers["sync/dense_bytes"]
    assert numbers["sync/total_wire_bytes"] == numbers["sync/wire_bytes"]


@pytest.mark.slow
def test_tables_of_one_width_are_one_exchange():
    """Three tables take the collectives of one, and a fourth of another width its own."""

    def collectives(*shapes):
        params = {f"table{i}": jnp.zeros(shape) for i, shape in enumerate(shapes)}
        tx = sparsejax.zen_sync(rules={"": "sparse"})

        def step(x):
            ids = jnp.zeros(400, jnp.int32) + x.astype(jnp.int32)
            rows_of = lambda leaf: jnp.zeros((400, leaf.shape[1])) + x[:, None]
            grads = {
                name: RowGrads.marked(ids, rows_of(leaf), leaf.shape)
                for name, leaf in params.items()
            }
            return tx.update(grads, tx.init(params))[0]

        run = on_ranks(step, 3)
        with helpers.every_platform():
            return len(helpers.collectives(jax.make_jaxpr(run)(jnp.zeros(3)), "cuda"))

    one = collectives((9_000, 4))
    assert collectives((9_000, 4), (7_000, 4), (20, 4)) == one
    assert collectives((9_000, 4), (7_000, 8)) == 2 * one


@pytest.mark.slow
def test_rows_stay_rows_however_many():
    """With lists as long as the table: room for no more than its rows, rounded up."""
    height, n = 3_000, 3
    tx = sparsejax.sync(schemes.Zen(), rules={"": "sparse"})
    ids = np.stack([np.random.default_rng(i).permutation(height) for i in range(n)])
    values = np.arange(n * height, dtype=np.float32).reshape(n, height, 1) % 64

    def step(ids, values):
        grads = RowGrads(ids[0], values[0], (height, 1))
        updates, state = tx.update(grads, tx.init(jnp.zeros((height, 1))))
        return updates, sparsejax.metrics(state)

    updates, numbers = on_ranks(step, n)(ids.astype(np.int32), values)
    assert is_row_grads(updates)
    assert height <= updates.capacity < height + 32 * n
    exact = np.zeros((height, 1))
    np.add.at(exact, ids, values)
    np.testing.assert_allclose(updates.to_dense(), exact / n, rtol=1e-6)
    # A slot of four bytes beside each number of four.
    assert numbers["sync/wire_bytes"] < 2.1 * numbers["sync/dense_bytes"]


@pytest.mark.slow
def test_a_table_that_is_sharded_by_columns():
    """Over a second axis each shard has its columns of the same rows."""
    grads = {
        "ids": RNG.integers(0, 6_000, (4, 30)).astype(np.int32),
        "rows": RNG.standard_normal((4, 30, 8)).astype(np.float32),
    }
    tx = sparsejax.zen_sync("data", rules={"": "sparse"})

    def step(grads):
        ids = sparsejax.local(grads["ids"][0], "model")
        table = {"table": RowGrads(ids, grads["rows"][0], (6_000, 4))}
        updates, _ = tx.update(table, tx.init({"table": jnp.zeros((6_000, 4))}))
        return updates["table"].to_dense()

    mesh = helpers.grid(data=4, model=2)
    specs = {"ids": P("data"), "rows": P("data", None, "model")}
    run = on_ranks(step, mesh=mesh, in_specs=(specs,), out_specs=P(None, "model"))
    exact = np.zeros((6_000, 8))
    np.add.at(exact, grads["ids"], grads["rows"])
    np.testing.assert_allclose(run(grads), exact / 4, rtol=1e-5, atol=1e-6)


def on_two_levels(**options):
    """Ids on two hosts of two ranks, and the metrics of their sum, which it checks."""
    ids = RNG.integers(0, 6_000, (4, 30)).astype(np.int32)
    ids[:, :10] = ids[0, :10]  # each crosses once
    values = RNG.standard_normal((4, 30, 4)).astype(np.float32)
    tx = sparsejax.zen_sync(("hosts", "devices"), rules={"": "sparse"}, **options)

    def step(ids, values):
        grads = RowGrads(ids[0], values[0], (6_000, 4))
        total, state = tx.update(grads, tx.init(jnp.zeros((6_000, 4))))
        by_rank = jax.tree.map(lambda x: x[None], total)
        return total, by_rank, sparsejax.metrics(state)

    both = P(("hosts", "devices"))
    specs = {"in_specs": both, "out_specs": (P(), both, P())}
    run = on_ranks(step, mesh=helpers.grid(hosts=2, devices=2), **specs)
    total, by_rank, numbers = run(ids, values)
    helpers.assert_same_on_all_ranks(by_rank)
    exact = np.zeros((6_000, 4))
    np.add.at(exact, ids, values)
    np.testing.assert_allclose(total.to_dense(), exact / 4, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        numbers["sync/value/density_after"], len(np.unique(ids)) / 6_000, rtol=1e-6
    )
    return ids, numbers


@pytest.mark.slow
def test_two_levels():
    """Two hosts swap the lists of each part: a slot and four numbers a row."""
    ids, numbers = on_two_levels()
    layout = two_level._INSIDE.over(6_000, 2)
    parts = [np.asarray(layout.assign(np.unique(host))[0]) for host in ids.reshape(2, -1)]
    fullest = max(np.bincount(part).max() for part in parts)
    assert numbers["sync/payload_bytes"] == fullest * 5 * 4
    assert numbers["sync/value/inside_bytes"] > numbers["sync/wire_bytes"]


@pytest.mark.slow
def test_a_pair_of_axes_as_one():
    _, numbers = on_two_levels(two_level=False)
    assert numbers["sync/payload_bytes"] > 1.5 * 30 * 5 * 4
    assert numbers["sync/value/inside_bytes"] == 0


@pytest.mark.parametrize(
    "tx",
    [
        sparsejax.warm_up(TX, 2),
        sparsejax.skip_nonfinite(TX),
        optax.masked(TX, {"table": True}),
        optax.partition({"table": TX}, {"table": "table"}),
    ],
    ids=["warm_up", "skip_nonfinite", "masked", "partition"],
)
def test_rows_stay_rows_in_what_is_around(tx):
    """Where there is a branch, both of its sides have one type."""
    updates = traced(tx)["table"]
    assert is_row_grads(updates)
    assert updates.ids.dtype == jnp.int32


@pytest.mark.parametrize(
    ("tx", "match"),
    [
        (optax.chain(sparsejax.dgc(0.01), TX), "a sparsejax sparsifier takes whole arrays"),
        (sparsejax.accumulate(TX, 2), "sparsejax.accumulate takes whole arrays"),
        (sparsejax.ok_topk_sync(0.01), r"OkTopk keeps what it leaves out .*schemes.Zen\("),
        (optax.chain(optax.scale(2.0), TX), "the ids of these RowGrads were changed"),
    ],
    ids=["sparsifier", "accumulate", "lossy", "scale"],
)
def test_what_takes_no_rows_refuses_them_by_name(tx, match):
    with pytest.raises(errors.SparsejaxError, match=f"'?table'?.*{match}"):
        traced(tx)


def test_all_reduce_refuses_rows():
    grads = RowGrads(jnp.zeros(5, jnp.int32), jnp.ones((5, 4)), TALL)
    with pytest.raises(errors.LeafError, match=r"all_reduce takes whole arrays: .*sync"):
        on_ranks(lambda x: sparsejax.all_reduce(grads), 2)(jnp.zeros(2))


def test_ids_that_were_computed_with_are_found_behind_a_synchronization():
    """optax.scale goes over all arrays of a tree, and ids are some of them."""

    def check(updates):
        updates["table"].check("table")
        return jnp.zeros(())

    traced(TX, check)
    with pytest.raises(errors.ArgumentError, match=r"table: the ids .*optax\.scale"):
        traced(optax.chain(TX, optax.scale(2.0)), check)


WHOLE = (10_000_000, 16)


def as_large_as_the_table(tx, n=4, ids=1_000):
    """What a step makes that has the table's rows, and the bytes of all temporaries.

    Compiled for shapes alone, so nothing is there of all this.
    """
    params = {
        "table": jax.ShapeDtypeStruct(WHOLE, jnp.float32),
        "kernel": jax.ShapeDtypeStruct((WHOLE[1], 4), jnp.float32),
    }

    def loss(params, ids):
        return jnp.mean((params["table"][ids] @ params["kernel"]) ** 2)

    def step(params, state, ids):
        grads = rows.value_and_grad(loss)(sparsejax.local(params), ids[0])[1]
        return tx.update(grads, state)

    run = on_ranks(step, n, in_specs=(P(), P(), P("data")))
    batch = jax.ShapeDtypeStruct((n, ids), jnp.int32)
    state = jax.eval_shape(tx.init, params)
    compiled = run.lower(params, state, batch).compile()
    made = re.findall(rf"= \w+\[[^\]]*\b{WHOLE[0]}\b.*", compiled.as_text())
    made = [line for line in made if " parameter(" not in line]
    return made, compiled.memory_analysis().temp_size_in_bytes


def test_a_step_makes_nothing_of_the_size_of_the_table():
    """Of a table of 640 MB a thousand rows on each of four ranks, 64 kB, are read."""
    made, temporaries = as_large_as_the_table(sparsejax.zen_sync())
    assert not made
    read = 1_000 * WHOLE[1] * 4
    # Lists of all ranks, their messages and sums.
    assert temporaries < 5 * 4 * read


def test_what_is_as_large_as_the_table_is_seen():
    made, temporaries = as_large_as_the_table(sparsejax.dense_sync())
    assert made
    assert temporaries >= WHOLE[0] * WHOLE[1] * 4
