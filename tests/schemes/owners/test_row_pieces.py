"""Rows of tables that are sharded over the ranks: the sums of pieces, rows on request."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.schemes.owners import row_pieces, row_requests
from sparsejax.units.row_grads import RowGrads
from sparsejax.wire import Wire
from tests import helpers


WIDTH = 5
# The rows of a piece of each table, and how many a rank lists.
TABLES = {500: 120, 7: 20, 1: 3}


@functools.cache
def program(n, dtype=None):
    def on_rank(lists):
        tables = [
            RowGrads(ids, rows, (n * height, WIDTH))
            for height, (ids, rows) in zip(TABLES, lists, strict=True)
        ]
        totals, traffic = row_pieces.scatter(tables, Wire(helpers.AXIS, dtype))
        return [(total.ids, total.rows) for total in totals], traffic

    return helpers.ranked(on_rank, n)


def uniform(rng, heights, shape):
    return rng.integers(-2, heights + 2, shape)


def all_of_one_piece(rng, heights, shape):
    return rng.integers(0, max(heights // 8, 1), shape)


def none(rng, heights, shape):
    return np.full(shape, heights)


@pytest.mark.parametrize("draw", [uniform, all_of_one_piece, none])
@pytest.mark.parametrize("n", [4, *helpers.slow(3)])
def test_each_rank_has_the_float64_sum_of_its_piece(n, draw):
    rng = np.random.default_rng(0)
    lists, wanted, listed = [], [], []
    for height, count in TABLES.items():
        ids = draw(rng, n * height, (n, count)).astype(np.int32)
        rows = rng.standard_normal((n, count, WIDTH)).astype(np.float32)
        rows[:, ::3] = 0  # a row of zeros is a row
        lists.append((ids, rows))
        real = (ids >= 0) & (ids < n * height)
        dense = np.zeros((n * height, WIDTH))
        np.add.at(dense, ids[real], rows.astype(np.float64)[real])
        wanted.append(dense.reshape(n, height, WIDTH))
        listed.append([{*ids[real & (ids // height == i)].tolist()} for i in range(n)])
    totals, traffic = program(n)(lists)
    for height, (ids, rows), dense, ours in zip(
        TABLES, totals, wanted, listed, strict=True
    ):
        for rank in range(n):
            own, of = np.asarray(ids)[rank], np.asarray(rows)[rank]
            real = own < height
            assert {*(own[real] + rank * height).tolist()} == ours[rank]
            assert real.sum() == len(ours[rank])
            found = np.zeros((height, WIDTH))
            found[own[real]] = of[real]
            np.testing.assert_allclose(found, dense[rank], rtol=1e-6, atol=1e-6)
    # A message has room for what the fullest has, and not for all that is listed.
    sent = float(np.asarray(traffic.push.wire)[0])
    room = sum(TABLES.values())
    if draw is uniform and n == 4:
        assert 0 < sent < (n - 1) * room * 4 * (WIDTH + 1) / 1.9


@functools.cache
def reading(n, height):
    def on_rank(args):
        ids, table = args
        rows_of = lambda slots: jnp.take(table, slots, axis=0, mode="clip")
        return row_requests.read(ids, height, Wire(helpers.AXIS), rows_of)

    return helpers.ranked(on_rank, n)


@pytest.mark.parametrize("n", [4, *helpers.slow(3)])
@pytest.mark.parametrize("most", [1, 40, 300])
def test_rows_that_are_asked_for_come_back_as_they_are(n, most):
    height, rng = 40, np.random.default_rng(n)
    table = rng.standard_normal((n, height, 3)).astype(np.float32)
    table[0, 0] = -0.0
    ids = rng.integers(-1, most, (n, 6, 4)).astype(np.int32)
    found = reading(n, height)((ids, table))
    whole = table.reshape(n * height, 3)
    wanted = whole[np.clip(ids, 0, n * height - 1)]
    np.testing.assert_array_equal(np.asarray(found).view(np.int32), wanted.view(np.int32))
