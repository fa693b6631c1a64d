"""A table on meshes of both kinds, its columns filled up or not."""

import jax
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import ColumnTable
from tests import helpers


HEIGHT, RANKS = 10, 4


def numbers(dim):
    return np.arange(HEIGHT * dim, dtype=np.float32).reshape(HEIGHT, dim)


@pytest.mark.parametrize("kind", helpers.KINDS)
@pytest.mark.parametrize("dim", [11, 12])
def test_it_is_read_whole_and_goes_to_other_ranks(dim, kind):
    """JAX slices no dimension unevenly that is sharded over an Explicit axis."""
    of = helpers.KINDS[kind]
    table = ColumnTable.of(numbers(dim), of(helpers.mesh_of(RANKS)))
    np.testing.assert_array_equal(table.whole(), numbers(dim))
    inside = jax.jit(lambda table: table.whole() + 1)(table)
    np.testing.assert_array_equal(inside, numbers(dim) + 1)
    for ranks in (1, 3):
        moved = ColumnTable.of(table.whole(), of(helpers.mesh_of(ranks)))
        assert moved.value.shape == (HEIGHT, -(-dim // ranks) * ranks)
        np.testing.assert_array_equal(moved.whole(), numbers(dim))


def test_it_stays_on_its_ranks_where_nothing_fills_it_up():
    mesh = helpers.mesh_of(RANKS)
    assert ColumnTable.of(numbers(12), mesh).whole().sharding.spec[1] == "data"
    assert ColumnTable.of(numbers(11), mesh).whole().sharding.is_fully_replicated


@pytest.mark.parametrize("kind", helpers.KINDS)
def test_a_target_of_other_ranks_has_their_columns(kind):
    mesh = helpers.KINDS[kind](helpers.mesh_of(RANKS))
    params = {"users": ColumnTable.of(numbers(11), mesh)}
    tx = optax.chain(sparsejax.zen_sync(), optax.adam(0.1))
    target = sparsejax.abstract_state(tx, params, mesh, ranks=3)
    assert target[1][0].mu["users"].value.shape == (HEIGHT, 12)
    assert target[1][0].mu["users"].value.sharding.is_fully_replicated
