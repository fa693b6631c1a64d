"""The laws of listed rows: every scheme of the exact sum is held to them.

A scheme that sends rows gives back those that any rank has listed, whatever is in them, and
their float64 sums; one that does not gives back the dense array. What it forecasts from
true counts is what it sends, but for where the fullest of hashed parts is reckoned: there a
message may be one size longer or shorter.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import schemes
from sparsejax.units.row_grads import RowGrads, is_row_grads
from tests import helpers
from tests.laws import test_forecast
from tests.laws.test_exact_sum import SCHEMES


HEIGHT, WIDTH, COUNT = 2003, 5, 120
# Schemes that define no `rows`; and owners with tables, which are as large as the table is.
TABLED = ["balanced_murmur", "balanced_algorithm_1"]
WITHOUT_ROWS = [
    name for name, x in SCHEMES.items() if type(x).rows is schemes.Scheme.rows
] + TABLED
# By owners of a hash or of ranges, by a gather, and densely.
OF_EACH_WAY = ["zen", "sparse_ps", "ag_sparse", "all_reduce"]
# Rows that are listed have no index code and no room of their own, so of these they go as
# those of others do; Zen's after a step, too, and its state wants to know the ranks.
AS_OTHERS = [
    *("balanced_coo32", "balanced_coo16", "balanced_coo8", "balanced_bitmap"),
    *("balanced_capacity", "hierarchical_bitmap", "hierarchical_bound"),
    *("zen_after_a_step", "zen_bytes", "omni_reduce_1"),
]
SEEN = [*OF_EACH_WAY, *AS_OTHERS]


@functools.cache
def program(name, n, dtype, check_vma):
    """From ids [n, K] and rows [n, K, width] to the sum, by rank and as one."""
    like = {"table": jnp.zeros((HEIGHT, WIDTH), dtype)}
    tx = sparsejax.sync(SCHEMES[name], reduce="sum", rules={"": "row", "table": "sparse"})
    shapes = []

    def on_rank(ids, rows):
        grads = {"table": RowGrads(ids[0], rows[0], (HEIGHT, WIDTH))}
        first = tx.init(like)
        updates, state = tx.update(grads, first)
        assert jax.tree.structure(first) == jax.tree.structure(state)
        shapes.append(updates["table"])
        by_rank = jax.tree.map(lambda x: x[None], updates["table"])
        return updates["table"], by_rank, sparsejax.metrics(state)

    mapped = helpers.shard_map(
        on_rank,
        mesh=helpers.mesh_of(n),
        in_specs=P("data"),
        out_specs=(P(), P("data"), P()),
        check_vma=check_vma,
    )
    ids = jax.ShapeDtypeStruct((n, COUNT), jnp.int32)
    rows = jax.ShapeDtypeStruct((n, COUNT, WIDTH), dtype)
    return jax.jit(mapped).lower(ids, rows).compile(), shapes[0]


def check(name, n, dtype="float32", check_vma=True):
    run, total = program(name, n, jnp.dtype(dtype), check_vma)
    assert is_row_grads(total) == (name not in WITHOUT_ROWS), f"{name}.rows is not taken"
    room = (n + 2) * float(jnp.finfo(dtype).eps)
    for case, ids in helpers.listed_ids(n, HEIGHT, COUNT).items():
        rows = helpers.drawn_rows(ids, WIDTH, dtype)
        if case == "uniform":
            rows[:, ::3] = 0  # listed all the same
        total, by_rank, numbers = jax.tree.map(np.asarray, run(ids, rows))
        where = f"{name}, n={n}, {case}"
        helpers.assert_same_on_all_ranks(by_rank)
        if is_row_grads(total):
            assert total.ids.tobytes() == np.asarray(by_rank.ids[0]).tobytes(), where
            inside = (ids >= 0) & (ids < HEIGHT)
            share = len(set(ids[inside].tolist())) / HEIGHT
            after = numbers["sync/table/density_after"]
            np.testing.assert_allclose(after, share if n > 1 else 1, rtol=1e-6)
        else:
            total = RowGrads(np.arange(HEIGHT), total, total.shape)
            kept = np.isin(total.ids, ids)
            assert not total.rows[~kept].any(), where
            total = RowGrads(np.where(kept, total.ids, HEIGHT), total.rows, total.shape)
        pair = total.ids, total.rows
        helpers.assert_sum_of_rows(pair, ids, rows, HEIGHT, room, where)
        sent, payload = numbers["sync/wire_bytes"], numbers["sync/payload_bytes"]
        assert payload <= sent * (1 + 1e-6), where
        assert (sent > 0) == (n > 1), where
        # Of ids that somebody made to collide a forecast knows nothing.
        if n > 1 and case != "of one owner":
            check_forecast(name, n, dtype, ids, float(sent), where)


def check_forecast(name, n, dtype, ids, sent, where):
    told = SCHEMES[name].forecast(load_of(n, dtype, ids))
    assert told.dense == (name in WITHOUT_ROWS)
    if told.dense:
        return
    # Beside the lists, the numbers on which ranks agree.
    least, most = 0, 50
    if told.pull:
        ratio = 1.5  # between sizes of short messages
        least, most = told.bytes * (1 / ratio - 1), told.bytes * (ratio - 1) + most
    assert least <= sent - told.bytes <= most, (where, told, sent)
    assert told.rounds == (2 if told.pull else 1), where
    assert told.messages > told.rounds


def load_of(n, dtype, ids):
    """The true load of ids [n, K]."""
    mask = np.stack([np.isin(np.arange(HEIGHT), row) for row in ids])
    listed = {"numbers": WIDTH, "dtype": str(dtype), "room": COUNT, "listed": True}
    return dataclasses.replace(test_forecast.load_of(mask, n, HEIGHT), **listed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "name"),
    [("cuda", "balanced"), ("tpu", "balanced"), ("cuda", "ag_sparse"), ("tpu", "zen")],
)
def test_rows_that_are_traced_for_other_platforms_are_the_same(platform, name):
    """Pairs are sorted there, and bounds compared with all; on TPUs slots go alone."""
    program.cache_clear()
    with helpers.traced_for(platform):
        check(name, 3)
    program.cache_clear()


@pytest.mark.parametrize(
    ("name", "n"),
    [
        *((name, 3) for name in OF_EACH_WAY),
        *helpers.slow(
            ("zen", 1),
            ("zen", 8),
            ("omni_reduce_20", 8),
            *((name, 3) for name in SCHEMES if name not in SEEN),
        ),
    ],
)
def test_every_scheme_adds_up_what_is_listed(name, n):
    check(name, n)


@pytest.mark.slow
def test_rows_of_16_bits_are_added_up_in_float32():
    check("zen", 3, "bfloat16")


@pytest.mark.slow
def test_without_checking_types():
    check("ag_sparse_ring", 3, check_vma=False)
