"""Rows of a gradient: dense, merged, and refused where they do not fit."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import sparsejax
from sparsejax import errors
from sparsejax.units import merging
from sparsejax.units.merging import merge, union
from sparsejax.units.row_grads import RowGrads
from tests import helpers


def rows_of(rng, capacity, shape, dtype=np.float32):
    """Few distinct ids, many times, some of them that of no row."""
    few = rng.choice(shape[0] + 1, min(7, shape[0]), replace=False)
    ids = rng.choice([*few, shape[0]], capacity).astype(np.int32)
    rows = rng.normal(size=(capacity, *shape[1:])).astype(np.float32)
    want = np.zeros((shape[0] + 1, *shape[1:]), np.float64)
    np.add.at(want, ids, rows)
    grads = RowGrads(jnp.asarray(ids), jnp.asarray(rows, dtype), shape)
    return grads, want[:-1].astype(np.float32), ids


@pytest.mark.parametrize("shape", [(0, 3), (5, 0)])
def test_a_table_without_numbers_has_no_rows(shape):
    """Each rank may list others; what comes of a sum is the same on all."""
    rules = {"": "row", "t": "sparse"}
    n, tx = 2, sparsejax.sync(sparsejax.schemes.Zen(), rules=rules)
    ids = np.array([[0, 3, 3], [1, 0, 9]], np.int32)
    rows = np.ones((n, 3, *shape[1:]), np.float32)

    def run(ids, rows):
        grads = {"t": RowGrads(ids, rows, shape)}
        total = tx.update(grads, tx.init({"t": jnp.zeros(shape)}))[0]["t"]
        return total.ids, total.rows

    total = helpers.ranked(run, n)(ids, rows)
    helpers.assert_same_on_all_ranks(total)
    assert (total[0] == shape[0]).all()
    assert not total[1].any()


# Merged by flags of all rows, and by a sort.
SHAPES = [(23, 3), (40 * 256 + 1, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_ids_add_up(shape):
    grads, want, ids = rows_of(np.random.default_rng(1), 40, shape)
    grads.check("table")
    dense, merged = jax.jit(lambda g: (g.to_dense(), merge(g)))(grads)
    np.testing.assert_allclose(dense, want, rtol=1e-5, atol=1e-6)
    there = np.unique(ids[ids < shape[0]])
    np.testing.assert_array_equal(merged.ids[: len(there)], there)
    np.testing.assert_array_equal(merged.ids[len(there) :], shape[0])
    np.testing.assert_array_equal(np.asarray(merged.rows[len(there) :]), 0)
    np.testing.assert_allclose(merged.to_dense(), want, rtol=1e-5, atol=1e-6)
    assert (merged.capacity, merged.ndim, merged.size) == (40, len(shape), want.size)


@pytest.mark.parametrize("shape", SHAPES)
def test_small_numbers_add_up_in_float32(shape):
    # In bfloat16 1 + 1/256 is 1; 8 of them are 1/32.
    ids = jnp.array([5] * 9 + [shape[0]] * 31, jnp.int32)
    rows = jnp.full((40, *shape[1:]), 1 / 256, jnp.bfloat16).at[0].set(1)
    merged = jax.jit(merging.merge)(RowGrads(ids, rows, shape))
    assert merged.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(merged.rows[0], np.float32), 1 + 1 / 32)


def test_checkify_reports_ids_out_of_range():
    """They are left out: `tests/fuzz/test_indices.py`."""
    grads = RowGrads(jnp.array([-1, 2, 24, 23]), jnp.ones((4, 3)), (23, 3))
    checked = checkify.checkify(lambda g: g.check("table"), checkify.user_checks)
    error, _ = checked(grads)
    with pytest.raises(checkify.JaxRuntimeError, match="table: ids must lie in"):
        error.throw()


def test_no_rows_at_all():
    none = RowGrads(jnp.zeros(0, jnp.int32), jnp.zeros((0, 3)), (5, 3))
    assert merge(none).capacity == 0
    np.testing.assert_array_equal(none.to_dense(), np.zeros((5, 3)))
    empty = RowGrads(jnp.zeros(2, jnp.int32), jnp.zeros((2, 3)), (0, 3))
    assert merge(empty).to_dense().shape == (0, 3)


def test_optax_adds_rows_to_a_table():
    """In the table's dtype, of NumPy's arrays as of JAX's."""
    grads, want, _ = rows_of(np.random.default_rng(1), 40, (23, 3))
    table = np.random.default_rng(2).normal(size=(23, 3)).astype(np.float32)
    for own in (table, jnp.asarray(table)):
        found = optax.apply_updates({"table": own}, {"table": grads})["table"]
        np.testing.assert_allclose(found, table + want, rtol=1e-5, atol=1e-6)
    small = optax.apply_updates(jnp.asarray(table, jnp.bfloat16), grads)
    assert small.dtype == jnp.bfloat16
    with pytest.raises(errors.ArgumentError, match=r"\[23, 3\].*has shape \[24, 3\]"):
        optax.apply_updates(jnp.zeros((24, 3)), grads)


@pytest.mark.parametrize("height", [100, 40 * 256 + 1])
def test_lists_of_distinct_keys_have_a_union(height):
    """By bits, and where the lists are short for them by a sort."""
    rng = np.random.default_rng(0)
    lists = np.stack([rng.choice(height, 10, replace=False) for _ in range(4)])
    lists[:, 2] = 31  # a bit that all have, the last of its word
    lists[:, 5:7] = height
    want, places = np.unique(lists, return_inverse=True)
    want = want[want < height]
    found, place = jax.jit(union, static_argnums=(1, 2))(jnp.array(lists), 30, height)
    np.testing.assert_array_equal(found, [*want, *[height] * (30 - len(want))])
    places = np.where(lists < height, places.reshape(lists.shape), 30)
    np.testing.assert_array_equal(place, places)


@pytest.mark.parametrize("height", [100, 40 * 256 + 1])
@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        ([3, 5, 9, -1], True),
        ([9, 3, 9, -1], False),
        ([9, -1, 3, 5], False),
        ([31, 31, 32, -1], False),
        ([32, 31, 64, 63], None),
    ],
)
def test_rows_are_merged_where_some_are_there_twice_or_not_in_front(ids, kept, height):
    ids = jnp.array(ids, jnp.int32)
    rows = jnp.arange(1, 5, dtype=jnp.float32)[:, None]
    short = jnp.where(ids < 0, height, ids)
    grads = RowGrads(ids, rows, (height, 1))
    once = jax.jit(merging.distinct_rows)(RowGrads(short, rows, (height, 1)))
    np.testing.assert_array_equal(once.to_dense(), grads.to_dense())
    there = np.asarray(once.ids)[: int((once.ids < height).sum())]
    assert sorted(there) == sorted(set(np.asarray(ids)) - {-1})
    # Lists in disorder are found to be distinct by bits, and else merged.
    kept = height == 100 if kept is None else kept
    assert np.array_equal(once.ids, short) == kept


# By flags of all rows, and of the last by a sort.
@pytest.mark.parametrize(
    ("platform", "height", "room"),
    [
        ("cpu", 33, None),
        *helpers.slow(
            ("cpu", 5000, 1100),
            ("cpu", 1025 * 256 + 1, None),
            ("cuda", 1025 * 256 + 1, None),
            ("cuda", 5000, 1100),
        ),
    ],
)
def test_the_distinct_ids_of_a_list_are_found(platform, height, room):
    rng = np.random.default_rng(7)
    traced = helpers.for_gpus if platform == "cuda" else contextlib.nullcontext
    with traced():
        find = jax.jit(lambda ids: merging.merged(ids, height, room))
        for high in (1, height, height + 40):
            ids = rng.integers(-2, high + 1, 1025).astype(np.int32)
            found = find(ids)
            inside = (ids >= 0) & (ids < height)
            distinct, places = np.unique(ids[inside], return_inverse=True)
            assert int(found.found) == len(distinct)
            np.testing.assert_array_equal(found.ids[: len(distinct)], distinct)
            np.testing.assert_array_equal(found.ids[len(distinct) :], height)
            assert found.ids.size == (room or ids.size)
            np.testing.assert_array_equal(np.asarray(found.places)[inside], places)
            np.testing.assert_array_equal(
                np.asarray(found.places)[~inside], room or ids.size
            )
            assert {x.dtype for x in found} == {np.dtype(np.int32)}
