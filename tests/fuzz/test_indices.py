"""Hostile indices of entries and rows: what is out of range is left out, equal ones add up.

Whatever integers they are: narrow ones that could not say how many units there are,
unsigned ones, and those of 64 bits, which are looked at whole where JAX has them.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

import sparsejax
from sparsejax.units import merging
from tests import helpers


COUNT, WIDTH = 8, 2
HEIGHTS = {"int8": 300, "uint8": 300}
DTYPES = ("int32", "int8", "uint8", "uint32", "int64", "uint64")


def height_of(dtype):
    return HEIGHTS.get(dtype, 5)


def widths(dtype):
    return jax.enable_x64(True) if "64" in dtype else contextlib.nullcontext()


@functools.cache
def program(dtype):
    """All that entries and rows can be asked for, of ids of this dtype."""
    height = height_of(dtype)
    shape = height, WIDTH

    def run(ids, rows):
        entries = sparsejax.SparseTensor(ids, rows[:, 0], (height,))
        whole = sparsejax.SparseTensor(ids, rows, shape)
        listed = sparsejax.RowGrads(ids, rows, shape)
        for node in (entries, whole, listed):
            node.check()
        each = [merging.merge(listed), merging.distinct_rows(listed)]
        dense = [entries.to_dense(), whole.to_dense(), listed.to_dense()]
        return dense, each, entries.present(), entries.kept()

    with widths(dtype):
        ids = jax.ShapeDtypeStruct((COUNT,), dtype)
        rows = jax.ShapeDtypeStruct((COUNT, WIDTH), jnp.float32)
        return jax.jit(run).lower(ids, rows).compile()


def any_ids(dtype):
    info, height = np.iinfo(dtype), height_of(dtype)
    near = {info.min, info.min + 1, -1, 0, 1, height - 1, height, height + 1, info.max}
    near |= {2**31 - 1, 2**31, 2**32, 2**32 + 1, -(2**31), -(2**32) + 1, -height}
    inside = [x for x in sorted(near) if info.min <= x <= info.max]
    one = st.one_of(
        st.integers(0, min(info.max, height + 1)),
        st.sampled_from(inside),
        st.integers(info.min, info.max),
    )
    return st.lists(one, min_size=COUNT, max_size=COUNT)


@pytest.mark.parametrize("dtype", helpers.mostly_slow(DTYPES, "int32", "uint8"))
def test_any_integers(dtype):
    height = height_of(dtype)
    rows = np.arange(1, COUNT * WIDTH + 1, dtype=np.float32).reshape(COUNT, WIDTH)

    @given(any_ids(dtype))
    @example([0] * COUNT)
    @example([min(height, np.iinfo(dtype).max)] * COUNT)
    def holds(ids):
        exact = np.zeros((height, WIDTH))
        inside = [x for x in ids if 0 <= x < height]
        for x, row in zip(ids, rows, strict=True):
            if 0 <= x < height:
                exact[x] += row
        with widths(dtype):
            found = jax.tree.map(np.asarray, program(dtype)(np.array(ids, dtype), rows))
        (entries, whole, listed), each, present, kept = found
        np.testing.assert_array_equal(entries, exact[:, 0])
        np.testing.assert_array_equal(whole, exact)
        np.testing.assert_array_equal(listed, exact)
        assert set(np.flatnonzero(present)) == set(inside)
        assert kept.dtype == np.int32
        assert [x if 0 <= x < height else height for x in ids] == kept.tolist()
        for one in each:
            real = one.ids < height
            assert sorted(one.ids[real].tolist()) == sorted(set(inside))
            assert (one.ids >= 0).all()
            dense = np.zeros((height, WIDTH))
            dense[one.ids[real]] = one.rows[real]
            np.testing.assert_array_equal(dense, exact)

    holds()


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_without_numbers_of_64_bits_jax_keeps_the_low_half(dtype):
    """What a compiled program is given has 32 bits: nobody can tell 2^32 + 1 from 1."""
    ids, rows = np.array([2**32 + 1, 3, 7], dtype), np.ones((3, 1), np.float32)
    run = jax.jit(lambda ids: sparsejax.RowGrads(ids, rows, (5, 1)).to_dense())
    np.testing.assert_array_equal(run(ids)[:, 0], [0, 1, 0, 1, 0])
    # An array of NumPy is looked at as it is.
    whole = sparsejax.RowGrads(ids, rows, (5, 1)).to_dense()
    np.testing.assert_array_equal(whole[:, 0], [0, 0, 0, 1, 0])
