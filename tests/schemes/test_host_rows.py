"""Listed rows on hosts of several ranks: added up inside, so each crosses once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import schemes
from sparsejax.schemes import two_level
from sparsejax.units.row_grads import RowGrads
from tests import helpers


OUTER, INNER = 2, 4
HEIGHT, WIDTH, COUNT = 2003, 5, 120
AXES = ("hosts", "devices")
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
    [("ag_sparse", 2, True), *helpers.slow(("balanced", 4, False), ("bfloat16", 2, True))],
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
