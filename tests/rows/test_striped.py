"""Rows that are stored striped are found again, and shards are read evenly."""

import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from benchmarks.data.workloads import zipf_chances
from sparsejax import errors
from tests import helpers


@pytest.mark.parametrize(("rows", "shards"), [(61, 4), *helpers.slow((3, 8))])
def test_a_table_is_read_as_if_it_lay_in_order(rows, shards):
    striped = sparsejax.rows.StripedRows(rows, shards)
    table = np.random.default_rng(0).standard_normal((rows, 3)).astype(np.float32)
    stored = striped.stored(jnp.asarray(table))
    assert stored.shape == (striped.height, 3)
    assert striped.height % shards == 0
    np.testing.assert_array_equal(striped.natural(stored), table)
    ids = np.arange(-rows, rows)
    np.testing.assert_array_equal(stored[striped.places(jnp.asarray(ids))], table[ids])
    # Row i is in shard i mod n.
    by_shard = np.asarray(striped.places(jnp.arange(rows))) // (striped.height // shards)
    np.testing.assert_array_equal(by_shard, np.arange(rows) % shards)
    out = striped.places(jnp.array([rows, rows + 5, -rows - 1]))
    assert out.tolist() == [striped.height] * 3


def test_shards_of_a_zipf_law_are_read_evenly():
    rows, shards = 65_536, 16
    chances = zipf_chances(rows, 0.0113)
    read = np.flatnonzero(np.random.default_rng(0).random(rows) < chances)
    striped = sparsejax.rows.StripedRows(rows, shards)
    length = rows // shards

    def imbalance(places):
        counts = np.bincount(np.asarray(places) // length, minlength=shards)
        return counts.max() / counts.mean()

    assert imbalance(read) > 4
    assert imbalance(striped.places(jnp.asarray(read))) < 1.3


def test_what_does_not_fit_is_refused():
    striped = sparsejax.rows.StripedRows(5, 2)
    with pytest.raises(errors.ArgumentError, match=r"a table of 5 rows.*\[6, 2"):
        striped.stored(jnp.ones((6, 2)))
    with pytest.raises(errors.ArgumentError, match=r"natural takes a table of 6 rows"):
        striped.natural(jnp.ones((5, 2)))
    with pytest.raises(errors.ArgumentError, match="shards must be"):
        sparsejax.rows.StripedRows(5, 0)
