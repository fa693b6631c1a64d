"""A table on meshes of both kinds, its columns filled up or not."""

import re

import jax
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import ColumnTable
from sparsejax.errors import ArgumentError, JobError
from sparsejax.jobs import agreement, store
from tests import helpers
from tests.helpers import jobs


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


@pytest.mark.parametrize("kind", helpers.KINDS)
@pytest.mark.parametrize("dim", [11, 12])
def test_it_is_replicated_where_it_is_whole(dim, kind):
    """Of several processes each can read it, whether columns fill it up or not."""
    mesh = helpers.KINDS[kind](helpers.mesh_of(RANKS))
    assert ColumnTable.of(numbers(dim), mesh).whole().sharding.is_fully_replicated


def asked(monkeypatch, *makes):
    """What each of several processes makes, or raises, all with devices of one mesh."""
    everyone = tuple(range(len(makes)))
    monkeypatch.setattr(agreement, "processes_of", lambda devices: everyone)
    return jobs.run(monkeypatch, makes)


def test_processes_that_make_other_tables_are_told(monkeypatch):
    """Each holds the columns of a table of its own, which replicas do not show."""
    mesh, x, key = helpers.mesh_of(RANKS), numbers(12), jax.random.key
    of = lambda values: lambda: ColumnTable.of(values, mesh)
    create = lambda key, dim=12, **options: (
        lambda: ColumnTable.create(key, HEIGHT, dim, mesh, **options)
    )
    for equal in (of(x), create(key(1)), create(jax.random.PRNGKey(1))):
        one, other = asked(monkeypatch, equal, equal)
        np.testing.assert_array_equal(one.whole(), other.whole())
    on = r" on host \S+ \(process {}\)"
    differ = lambda name, *two: (
        rf"{name} is {two[0]}{on.format(0)}, and {two[1]}{on.format(1)}"
    )
    hashed = r"float32\[10, 12\] of hash \w{16}"
    for match, makes in {
        differ("the table", hashed, hashed): (
            of(x),
            of(x + np.eye(HEIGHT, 12, dtype=np.float32)),
        ),
        differ("its key", r"key<fry> \[0, 1\]", r"key<fry> \[0, 2\]"): (
            create(key(1)),
            create(key(2)),
        ),
        differ("the table", r"float32\[10, 12\]", r"float32\[10, 13\]"): (
            create(key(1)),
            create(key(1), 13),
        ),
        differ("its init", r"of hash \w{16}", r"of hash \w{16}"): (
            create(key(1), init=jax.nn.initializers.normal(0.1)),
            create(key(1), init=jax.nn.initializers.normal(0.2)),
        ),
    }.items():
        for error in asked(monkeypatch, *makes):
            assert isinstance(error, JobError)
            assert re.search(match, str(error)), error
            fix = "Give all processes the same key and init, or the same numbers."
            assert fix in str(error)
    # What one refuses the other is told.
    error, refused = asked(monkeypatch, of(x), of(x[0]))
    assert isinstance(refused, ArgumentError)
    assert re.search(r"\(process 1\) cannot go on: ArgumentError", str(error))


def test_a_process_alone_asks_nobody(monkeypatch):
    monkeypatch.setattr(store, "of_all", None)
    ColumnTable.of(numbers(12), helpers.mesh_of(RANKS))
    ColumnTable.create(jax.random.key(0), HEIGHT, 12, helpers.mesh_of(RANKS))


@pytest.mark.parametrize("kind", helpers.KINDS)
def test_a_target_of_other_ranks_has_their_columns(kind):
    mesh = helpers.KINDS[kind](helpers.mesh_of(RANKS))
    params = {"users": ColumnTable.of(numbers(11), mesh)}
    tx = optax.chain(sparsejax.zen_sync(), optax.adam(0.1))
    target = sparsejax.abstract_state(tx, params, mesh, ranks=3)
    assert target[1][0].mu["users"].value.shape == (HEIGHT, 12)
    assert target[1][0].mu["users"].value.sharding.is_fully_replicated
