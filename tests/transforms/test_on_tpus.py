"""On TPUs numbers are summed densely, rows are not, and what does not suit is said once."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from sparsejax import schemes
from sparsejax.errors import PlatformWarning
from sparsejax.rows import lazy
from sparsejax.schemes.or_dense import suited
from sparsejax.units.dense import Dense
from sparsejax.units.row_grads import RowGrads
from tests import helpers


SIZE, SHAPE = 1 << 19, (1 << 16, 16)
ZEN = schemes.BalancedParallelism()


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch):
    monkeypatch.setattr(sparsejax.errors, "_said", set())


def program(tx, gradient, platform="tpu", leaf="kernel", shape=None, **sizes):
    """The jaxpr of a sum over described devices."""
    mesh = helpers.described(platform, **(sizes or {"data": 4}))
    ranks = P(mesh.axis_names)
    params = {leaf: jnp.zeros(shape or gradient.shape)}

    def run(x):
        own = jax.tree.map(lambda x: x[0], x)
        return tx.update({leaf: own}, tx.init(params))[0]

    n = mesh.size
    stacked = jax.tree.map(lambda x: by_rank(mesh, (n, *x.shape), x.dtype), gradient)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=ranks, out_specs=P())
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.make_jaxpr(mapped)(stacked)


def like(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def by_rank(mesh, shape, dtype=jnp.float32):
    """An array without values, sharded over all axes of a described mesh."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def on_ranks(run, out_specs):
    """The jaxpr of a function of numbers by rank, over four described devices."""
    mesh = helpers.described("tpu", data=4)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=out_specs)
    return jax.make_jaxpr(mapped)(by_rank(mesh, (4, SIZE)))


def said(of):
    """What is said while something is traced."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlatformWarning)
        of()
    return [str(one.message) for one in caught if one.category is PlatformWarning]


NUMBERS = {
    "by default": lambda: sparsejax.zen_sync("data"),
    "by a scheme": lambda: sparsejax.sync(ZEN, "data"),
    "by a rule": lambda: sparsejax.sync(schemes.AllReduce(), "data", rules={"k": ZEN}),
}


@pytest.mark.parametrize("way", NUMBERS)
def test_numbers_are_one_dense_sum_and_a_warning_says_so_once(way):
    found = []
    run = lambda: found.append(program(NUMBERS[way](), like(SIZE)))
    (text,) = said(run)
    assert f"'kernel', {SIZE:,} single numbers" in text
    assert "summed densely" in text
    (one,) = helpers.collectives(found[0])
    assert one.name == "psum"
    assert not helpers.scatters(found[0])
    assert not said(run)  # once


def test_numbers_of_two_slices_are_one_dense_sum():
    tx = sparsejax.zen_sync(("slices", "data"))
    with pytest.warns(PlatformWarning, match="summed densely"):
        found = program(tx, like(SIZE), slices=2, data=2)
    assert [one.name for one in helpers.collectives(found)] == ["psum"]


def test_what_is_dense_anyway_says_nothing():
    assert not said(lambda: program(sparsejax.dense_sync("data"), like(SIZE)))
    dense = sparsejax.zen_sync("data", rules={"kernel": "dense"})
    assert not said(lambda: program(dense, like(SIZE)))
    assert not said(lambda: program(sparsejax.zen_sync("data"), like(SIZE), data=1))


def test_on_gpus_numbers_go_by_their_scheme():
    tx = sparsejax.sync(ZEN, "data")
    found = []
    assert not said(lambda: found.append(program(tx, like(SIZE), "cuda")))
    assert max(helpers.scatters(found[0])) >= SIZE


def test_a_lossy_scheme_of_numbers_stays_and_says_so():
    tx, kept = schemes.OkTopk(0.01), []

    def run(x):
        kept.append(suited(tx, Dense(x[0]), "kernel", sparsejax.wire.Wire("data")))
        return x

    (text,) = said(lambda: on_ranks(run, P("data")))
    assert kept == [tx]
    assert "OkTopk was to sum 'kernel'" in text
    assert "and does" in text


def test_pieces_of_numbers_are_a_reduce_scatter():
    """A parameter that is sharded over the ranks: each needs a piece of the sum."""
    from sparsejax.transforms.buckets import pieces
    from sparsejax.transforms.buckets.bucket import Bucket

    bucket = Bucket("kernel", ZEN, (0,), ("kernel",), (SIZE,), ())

    def run(x):
        wire = sparsejax.wire.Wire("data")
        ((found, _),) = pieces.summed(bucket, [x[0]], [0], wire, ZEN)
        return found[0]

    with pytest.warns(PlatformWarning, match="summed densely"):
        found = on_ranks(run, P("data"))
    assert [one.name for one in helpers.collectives(found, "tpu")] == ["reduce_scatter"]


def test_all_reduce_sums_numbers_densely():
    with pytest.warns(PlatformWarning, match="summed densely"):
        found = on_ranks(lambda x: sparsejax.all_reduce(x[0], "data"), P())
    assert [one.name for one in helpers.collectives(found)] == ["psum"]


# --- Rows.


@pytest.mark.parametrize("sizes", [{"data": 4}, *helpers.slow({"slices": 2, "data": 2})])
def test_rows_go_by_their_scheme_without_a_scatter_over_all_units(sizes):
    tx = sparsejax.sync(ZEN, (*sizes,) if len(sizes) > 1 else "data")
    by = lambda platform: program(tx, like(*SHAPE), platform, "embedding", **sizes)
    tpu, gpu = [], []
    assert not said(lambda: tpu.append(by("tpu")))
    gpu.append(by("cuda"))
    names = {one.name for one in helpers.collectives(tpu[0])}
    assert "all_to_all" in names  # it is sparse
    # A part is what one of two levels leaves of the table.
    part = SHAPE[0] // sizes.get("data", 1) if len(sizes) > 1 else SHAPE[0]
    assert max(helpers.scatters(tpu[0])) < part
    assert max(helpers.scatters(gpu[0])) >= part


@pytest.mark.slow
def test_what_is_searched_is_exact_at_any_density():
    """The program for TPUs, run on CPUs: by entries, with whole sums back, densely."""
    run = lambda x: helpers.call(ZEN, x).total
    with helpers.traced_for("tpu"):
        summed = helpers.ranked(run, 3)
        for density in (0.0, 0.01, 0.2, 0.3, 1.0):
            x = helpers.gradients(3, 1600, density, shape=(2,), seed=5)
            totals = summed(x)
            helpers.assert_same_on_all_ranks(totals)
            np.testing.assert_array_equal(totals[0], helpers.total(x))


@pytest.mark.parametrize("sizes", [{"data": 2}, *helpers.slow({"slices": 2, "data": 2})])
def test_listed_rows_have_no_scatter_of_more_updates_than_there_is_room_for_rows(sizes):
    count, height, width = 512, 1 << 20, 128
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    gradient = RowGrads(ids, like(count, width), (height, width))
    tx = sparsejax.sync(ZEN, (*sizes,) if len(sizes) > 1 else "data")
    by = lambda: program(tx, gradient, "tpu", "embedding", (height, width), **sizes)
    found = []
    assert not said(lambda: found.append(by()))
    listed = count * math.prod(sizes.values())
    # Messages have room for owners of more rows than the mean one.
    assert listed <= max(helpers.scatters(found[0])) <= 1.5 * listed


# --- Rows of lazy optimizers.


def step_of(width, platform):
    """Traces a step of a lazy optimizer by rows so wide."""
    tx, mesh = lazy(optax.sgd(0.1)), helpers.described(platform, data=1)

    def step(table, ids, rows):
        params = {"table": table}
        grads = {"table": RowGrads(ids, rows, table.shape)}
        return tx.update(grads, tx.init(params), params)[0]["table"].rows

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())
    like_ids = jax.ShapeDtypeStruct((4,), jnp.int32)
    jax.eval_shape(mapped, like(64, width), like_ids, like(4, width))


def test_lazy_says_once_that_rows_are_narrower_than_lanes():
    assert not said(lambda: step_of(16, "cuda"))
    assert not said(lambda: step_of(128, "tpu"))
    (text,) = said(lambda: step_of(16, "tpu"))
    assert "'table' [64, 16]" in text
    assert "Pad the width of the table to 128" in text
    assert not said(lambda: step_of(16, "tpu"))
