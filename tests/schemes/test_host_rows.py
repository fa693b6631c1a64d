"""Listed rows on hosts of several ranks: added up inside, so each crosses once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import schemes
from sparsejax.schemes import forecast, two_level
from sparsejax.units.row_grads import RowGrads
from tests import helpers


OUTER, INNER = 2, 4
HEIGHT, WIDTH, COUNT = 2003, 5, 120
AXES = ("hosts", "devices")
ROW_BYTES = 4 * (1 + WIDTH)
ACROSS = {
    "balanced": schemes.BalancedParallelism(),
    "ag_sparse": schemes.AGSparse(),
    "bfloat16": schemes.AGSparse(wire_dtype=jnp.bfloat16),
}


@functools.cache
def program(name, outer, check_vma=True):
    """From ids [ranks, K] and rows of a table, and one of half its height, to the sums."""
    tables = {"table": (HEIGHT, WIDTH), "half": (HEIGHT // 2, WIDTH)}
    like = {name: jnp.zeros(shape) for name, shape in tables.items()}
    tx = sparsejax.sync(ACROSS[name], AXES, reduce="sum", rules={"": "sparse"})

    def on_rank(ids, rows):
        grads = {
            name: RowGrads(ids[0] // (HEIGHT // shape[0]), rows[0], shape)
            for name, shape in tables.items()
        }
        updates, state = tx.update(grads, tx.init(like))
        by_rank = jax.tree.map(lambda x: x[None], updates)
        return updates, by_rank, sparsejax.metrics(state)

    specs = {"in_specs": P(AXES), "out_specs": (P(), P(AXES), P())}
    mesh = helpers.grid(hosts=outer, devices=8 // outer)
    return jax.jit(helpers.shard_map(on_rank, mesh=mesh, check_vma=check_vma, **specs))


def cases(outer):
    """Ids [ranks, K] of all kinds, with those that all ranks have of one part inside."""
    layout = two_level._INSIDE.over(HEIGHT, 8 // outer)
    one_part = np.asarray(layout.invert(np.zeros(1, np.int32), jnp.arange(layout.width)))
    one_part = one_part[one_part < HEIGHT][:COUNT]
    return helpers.listed_ids(8, HEIGHT, COUNT) | {
        "of one part": np.broadcast_to(one_part, (8, COUNT)).astype(np.int32)
    }


@pytest.mark.parametrize(
    ("name", "outer", "check_vma"),
    [
        ("ag_sparse", 2, True),
        *helpers.slow(("balanced", 4, False), ("bfloat16", 2, True)),
    ],
)
def test_the_sums_are_those_of_all_ranks(name, outer, check_vma):
    room = 1e-6 if name != "bfloat16" else 2e-2
    for case, ids in cases(outer).items():
        rows = helpers.drawn_rows(ids, WIDTH, np.float32)
        total, by_rank, numbers = jax.tree.map(
            np.asarray, program(name, outer, check_vma)(ids, rows)
        )
        helpers.assert_same_on_all_ranks(by_rank)
        for key, height in (("table", HEIGHT), ("half", HEIGHT // 2)):
            pair, own = (total[key].ids, total[key].rows), ids // (HEIGHT // height)
            helpers.assert_sum_of_rows(pair, own, rows, height, room, f"{case}, {key}")
        (inside,) = (x for key, x in numbers.items() if key.endswith("/inside_bytes"))
        assert (inside > 0) == (case != "of one part"), case


def test_hosts_of_one_device_return_sums_that_all_devices_have():
    """The types say so: the sums leave `shard_map` as replicated."""
    ids = np.zeros((8, COUNT), np.int32)
    rows = helpers.drawn_rows(ids, WIDTH, np.float32)
    total, _, _ = program("ag_sparse", 8).eval_shape(ids, rows)
    assert total["table"].shape == (HEIGHT, WIDTH)


def merged_rows(ids, outer):
    """The rows of the fullest part of any host."""
    layout = two_level._INSIDE.over(HEIGHT, 8 // outer)
    hosts = [np.unique(host) for host in ids.reshape(outer, -1)]
    parts = [np.asarray(layout.assign(jnp.asarray(host))[0]) for host in hosts]
    return max(np.bincount(part).max() for part in parts)


@pytest.mark.slow
def test_a_row_that_several_ranks_of_a_host_list_crosses_once():
    """Two hosts swap lists: of four ranks with equal ids each sends about a quarter."""
    ids = np.random.default_rng(0).permutation(HEIGHT)[:COUNT].astype(np.int32)
    ids = np.broadcast_to(ids, (8, COUNT))
    rows = helpers.drawn_rows(ids, WIDTH, np.float32)
    tx = sparsejax.sync(ACROSS["ag_sparse"], AXES, rules={"": "sparse"})

    def on_rank(ids, rows):
        grads = {"table": RowGrads(ids[0], rows[0], (HEIGHT, WIDTH))}
        state = tx.update(grads, tx.init({"table": jnp.zeros((HEIGHT, WIDTH))}))[1]
        return sparsejax.metrics(state)

    mesh = helpers.grid(hosts=OUTER, devices=INNER)
    specs = {"in_specs": P(AXES), "out_specs": P()}
    numbers = jax.jit(helpers.shard_map(on_rank, mesh=mesh, **specs))(ids, rows)
    most = merged_rows(ids, OUTER)
    assert numbers["sync/payload_bytes"] == most * ROW_BYTES < 0.4 * COUNT * ROW_BYTES
    load = forecast.Load(
        8, HEIGHT, WIDTH, "float32", (float(COUNT),) * 4, room=COUNT, listed=True
    )
    told = schemes.TwoLevel(ACROSS["ag_sparse"]).forecast(load.part(INNER))
    # The forecast is of the mean part, and lists have one of a few sizes.
    assert 0.6 < told.bytes / numbers["sync/wire_bytes"] <= 1


def test_a_scheme_without_rows_is_given_whole_tables():
    tx = sparsejax.sync(schemes.SparCML(), AXES, rules={"": "sparse"})

    def on_rank(ids):
        rows = jnp.ones((COUNT, WIDTH)) * (1 + ids[0][:, None])
        grads = {"table": RowGrads(ids[0], rows, (HEIGHT, WIDTH))}
        return tx.update(grads, tx.init({"table": jnp.zeros((HEIGHT, WIDTH))}))[0]

    mesh = helpers.grid(hosts=OUTER, devices=INNER)
    run = helpers.shard_map(on_rank, mesh=mesh, in_specs=P(AXES), out_specs=P())
    shape = jax.eval_shape(run, jax.ShapeDtypeStruct((8, COUNT), jnp.int32))
    assert shape["table"].shape == (HEIGHT, WIDTH)


def of_sets(sets, height, room):
    """What Zen sends for sets of rows of 512 numbers, one of each host."""
    held = forecast.merged(len(sets))
    union = lambda k: max(
        len(np.unique(np.concatenate(sets[i : i + k])))
        for i in range(0, len(sets) - k + 1, k)
    )
    counts = tuple(float(union(k)) for k in held)
    load = forecast.Load(len(sets), height, 512, "float32", counts, room=room, listed=True)
    return schemes.Zen().forecast(load).bytes


@pytest.mark.slow
def test_hosts_of_eight_send_three_fifths_of_what_lists_by_rank_do():
    """Words by Zipf's law, of the paper's LSTM, on 16 hosts: forecasts from true counts."""
    hosts, inner, listed, height = 16, 8, 8192, 793_471
    share = 1 / np.arange(1, height + 1)
    drawn = np.random.default_rng(0).choice(
        height, (hosts, inner, listed), p=share / share.sum()
    )
    layout = two_level._INSIDE.over(height, inner)
    merged = [np.unique(host).astype(np.int32) for host in drawn]
    parts = [host[np.asarray(layout.assign(host)[0]) == 0] for host in merged]
    held = forecast.owned_of(forecast.room_of(listed, inner, layout.width), inner, height)
    by_parts = of_sets(parts, layout.width, held)
    by_rank = of_sets([np.unique(host[0]) for host in drawn], height, listed)
    assert 0.5 < by_parts / by_rank < 0.65, inner * np.array([by_parts, by_rank]) / 1e6
