"""Lookups in tables that are sharded by columns: vectors, gradients, and what is sent."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from benchmarks.papers.formulas.cost_tables import embrace_all_to_all
from sparsejax.embrace import ColumnTable, column_lookup
from sparsejax.rows.lookup import _said
from tests import helpers
from tests.helpers import mesh_of


HEIGHTS, DIMS, SHAPES = (40, 9), (13, 16), ((5, 4), (12,))
NAMES = ("many", "few")


def drawn(n):
    """Tables, ids that repeat on a rank and over ranks, and what vectors are weighed by.

    Rank 0 has ids that are out of range, and some that count from the end.
    """
    rng = np.random.default_rng(n)
    tables, ids, weights = {}, {}, {}
    for name, height, dim, shape in zip(NAMES, HEIGHTS, DIMS, SHAPES, strict=True):
        tables[name] = rng.normal(size=(height, dim)).astype(np.float32)
        ids[name] = rng.zipf(1.3, (n, *shape)) % height
        ids[name][0].flat[:4] = height, -1, -height - 1, 2**31 - 1
        ids[name] = ids[name].astype(np.int32)
        weights[name] = rng.normal(size=(n, *shape, dim)).astype(np.float32)
    return tables, ids, weights


@functools.cache
def program(n, check_vma, capacity=None):
    """Vectors, gradients by rows and whole, and traffic, by rank."""
    rooms = capacity and dict(zip(NAMES, capacity, strict=True))

    def on_rank(tables, ids, weights):
        ids, weights = jax.tree.map(lambda x: x[0], (ids, weights))

        def loss(tables):
            vectors, traffic = column_lookup(tables, ids, capacity=rooms, traffic=True)
            products = [
                jnp.where(jnp.isnan(vectors[k]), 0, vectors[k]) * weights[k] for k in NAMES
            ]
            return sum(x.sum() for x in products), (vectors, traffic)

        (_, (vectors, traffic)), rows = sparsejax.value_and_grad(loss, has_aux=True)(tables)
        whole = jax.grad(loss, has_aux=True)(tables)[0]
        rows = {k: (rows[k].value.ids, rows[k].value.rows) for k in NAMES}
        stacked = jax.tree.map(lambda x: x[None], (vectors, rows))
        return stacked, whole, traffic

    specs = {name: P(None, "data") for name in NAMES}
    tables = {k: ColumnTable(specs[k], d) for k, d in zip(NAMES, DIMS, strict=True)}
    mapped = helpers.shard_map(
        on_rank,
        mesh=mesh_of(n),
        in_specs=(tables, P("data"), P("data")),
        out_specs=(P("data"), tables, P()),
        check_vma=check_vma,
    )
    return jax.jit(mapped)


def placed(tables, n):
    return {name: ColumnTable.of(x, mesh_of(n)) for name, x in tables.items()}


def run(n, check_vma=True, capacity=None, given=None):
    tables, ids, weights = given or drawn(n)
    with warnings.catch_warnings():
        # Its gradient is taken by jax.grad, too.
        warnings.simplefilter("ignore", sparsejax.errors.DenseGradientWarning)
        made = program(n, check_vma, capacity)(placed(tables, n), ids, weights)
        return jax.tree.map(np.asarray, made)


def summed(ids, weights, height, dtype=np.float32):
    """The gradient of a table: ids that repeat on a rank first, then rank by rank."""
    total = np.zeros((height, weights.shape[-1]), dtype)
    for own, g in zip(ids, weights, strict=True):
        own = np.where((own < 0) & (own >= -height), own + height, own).reshape(-1)
        g, real = g.reshape(own.size, -1).astype(dtype), (own >= 0) & (own < height)
        mine = np.zeros_like(total)
        np.add.at(mine, own[real], g[real])
        total += mine
    return total


@pytest.mark.parametrize(("n", "check_vma"), [(2, True), *helpers.slow((3, False))])
def test_vectors_and_gradients_are_those_of_the_whole_table(n, check_vma):
    """As bytes: vectors are copied, and gradients added up in the order of the ranks."""
    tables, ids, weights = drawn(n)
    (vectors, rows), whole, _ = run(n, check_vma)
    for k, height in zip(NAMES, HEIGHTS, strict=True):
        want = jnp.take(tables[k], ids[k], axis=0)
        assert np.isnan(want).any()
        assert vectors[k].tobytes() == np.asarray(want).tobytes()
        exact = summed(ids[k], weights[k], height, np.float64)
        total, dim = summed(ids[k], weights[k], height), tables[k].shape[1]
        assert whole[k].value[:, :dim].tobytes() == total.tobytes()
        assert not whole[k].value[:, dim:].any()
        np.testing.assert_allclose(total, exact, rtol=1e-6, atol=1e-6)
        listed, columns = rows[k]
        assert (listed == listed[0]).all()  # the same on all ranks
        merged = np.zeros((height + 1, columns.shape[-1] * n), np.float32)
        np.add.at(merged, listed[0], np.moveaxis(columns, 0, 1).reshape(len(listed[0]), -1))
        assert merged[:-1, :dim].tobytes() == total.tobytes()
        # A rank lists an id once, however often it has read it.
        real = ids[k].reshape(n, -1)
        real = [{int(i % height) for i in own if -height <= i < height} for own in real]
        assert sorted(listed[0][listed[0] < height]) == sorted(
            i for own in real for i in own
        )


@pytest.mark.parametrize("n", [2, *helpers.slow(4)])
def test_what_is_sent_is_what_the_paper_says(n):
    _, ids, _ = drawn(n)
    _, _, traffic = run(n)
    rooms = [min(int(np.prod(s)), h) for s, h in zip(SHAPES, HEIGHTS, strict=True)]
    distinct = [
        max(len({*own[(own >= 0) & (own < h)]} | {*(own[own == -1] + h)}) for own in ids[k])
        for k, h in zip(NAMES, HEIGHTS, strict=True)
    ]

    def paper(counts, dims):
        parts = zip(counts, HEIGHTS, dims, strict=True)
        costs = [embrace_all_to_all(4 * h * d, k / h, n) for k, h, d in parts]
        return sum(cost.bytes for cost in costs)

    # With room for all ids of a batch, and columns that fill up; without either.
    padded = [-(-dim // n) * n for dim in DIMS]
    of_ids = (n - 1) * 4
    assert traffic.wire == pytest.approx(paper(rooms, padded) + of_ids * sum(rooms))
    needed = paper(distinct, DIMS) + of_ids * sum(distinct)
    assert traffic.payload == pytest.approx(needed)
    assert traffic.push.wire == pytest.approx(paper(rooms, padded) / 2)
    assert traffic.scalars == 0
    assert traffic.density_before == pytest.approx(sum(distinct) / sum(HEIGHTS))


def sent(n, capacity=None):
    """The collectives of a program, but for those of its traffic, by their paths."""
    tables, ids, weights = drawn(n)
    rooms = capacity and dict(zip(NAMES, capacity, strict=True))

    def alone(tables, ids, weights):
        def on_rank(tables, ids, weights):
            def loss(tables):
                vectors = column_lookup(tables, ids, capacity=rooms)
                return sum((vectors[k] * weights[k]).sum() for k in NAMES)

            value, grads = sparsejax.value_and_grad(loss)(tables)
            return value[None], grads["many"].value.rows[None]

        specs = {
            k: ColumnTable(P(None, "data"), d) for k, d in zip(NAMES, DIMS, strict=True)
        }
        return helpers.shard_map(
            on_rank,
            mesh=mesh_of(n),
            in_specs=(specs, P("data"), P("data")),
            out_specs=P("data"),
        )(tables, ids, weights)

    lowered = jax.jit(alone)
    traced = jax.make_jaxpr(alone)(placed(tables, n), ids, weights)
    return helpers.collectives(traced), lowered, (placed(tables, n), ids, weights)


@pytest.mark.slow
def test_several_tables_are_one_exchange_there_and_one_back():
    seen, step, given = sent(4)
    # On CPUs few ids go as an all-to-all of copies.
    assert [one.name for one in seen] == ["all_to_all"] * 3
    _, _, traffic = run(4)
    total = sum(helpers.sent_bytes(one, 4) for one in seen)
    assert traffic.wire == pytest.approx(total)
    text = step.lower(*given).compile().as_text()
    assert text.count(" all-to-all(") == 3
    assert text.count(" all-gather(") == 0


@pytest.mark.slow
def test_a_capacity_sends_less_where_ids_fit_and_nothing_else_changes():
    n, capacity = 2, (12, 5)
    tables, ids, weights = drawn(n)
    ids = {k: np.where(np.abs(x) < 4, x, 0) for k, x in ids.items()}
    for given, fits in (((tables, ids, weights), True), (drawn(n), False)):
        (vectors, _), whole, traffic = run(n, capacity=capacity, given=given)
        (plain, _), want, before = run(n, given=given)
        for k in NAMES:
            assert vectors[k].tobytes() == plain[k].tobytes()
            assert whole[k].value.tobytes() == want[k].value.tobytes()
        assert traffic.scalars == 4
        dims = 2 * (n - 1) / n * 4 * np.array([-(-dim // n) * n for dim in DIMS])
        rooms = np.array([12, 5]) if fits else np.array([20, 9])
        want = dims @ rooms + 4 * (n - 1) * sum(rooms)
        assert traffic.wire == pytest.approx(want + 4)
        assert traffic.payload == before.payload
    paths = [one.path for one in sent(n, capacity)[0] if one.name == "all_to_all"]
    # One of two that are compiled runs, of ids, and of columns there and back.
    assert sorted(path[-1] for path in paths) == ["cond[0]"] * 3 + ["cond[1]"] * 3


def one_by_one(fn, n, *args):
    """Calls fn(table, ...) on n ranks, for a table [9, 5]; its numbers, and the results."""
    values = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    table = ColumnTable.of(values, mesh_of(n))

    def on_rank(table, *args):
        made = fn(table, *jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], made)

    specs = (table.specs(), *[P("data") for _ in args])
    call = helpers.shard_map(on_rank, mesh=mesh_of(n), in_specs=specs, out_specs=P("data"))
    return values, jax.tree.map(np.asarray, jax.jit(call)(table, *args))


@pytest.mark.slow
def test_ids_out_of_range_are_what_a_lookup_of_the_whole_table_makes_of_them():
    ids = np.array([[0, -1, -9, -10], [9, 8, 2**31 - 1, 3]])
    narrow = np.array([[0, 8, 9, 255], [1, 1, 2, 200]])
    kinds = [ids.astype(np.int32), narrow.astype(np.uint8), narrow.astype(np.uint32)]
    options = [{}, {"mode": "clip"}, {"mode": "wrap"}, {"mode": "fill", "fill_value": 7.0}]

    def every(table, *kinds):
        return [[column_lookup(table, ids, **each) for each in options] for ids in kinds]

    values, made = one_by_one(every, 2, *kinds)
    for ids, found in zip(kinds, made, strict=True):
        for each, vectors in zip(options, found, strict=True):
            want = jnp.take(values, ids.astype(np.int32), axis=0, **each)
            np.testing.assert_array_equal(vectors, want, err_msg=f"{ids.dtype} {each}")


def test_no_ids_read_nothing_and_send_nothing():
    def none(table, ids):
        loss = lambda table: column_lookup(table, ids).sum()
        return column_lookup(table, ids), jax.grad(loss)(table).value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sparsejax.errors.DenseGradientWarning)
        _, (vectors, grads) = one_by_one(none, 2, np.zeros((2, 3, 0), np.int32))
    assert vectors.shape == (2, 3, 0, 5)
    assert grads.shape == (2, 9, 3)
    assert not grads.any()


def test_equal_ids_of_16_bit_tables_add_up_in_32():
    table = ColumnTable.of(np.ones((4, 2), jnp.bfloat16), mesh_of(2))

    def on_rank(table, ids, weights):
        loss = lambda table: (column_lookup(table, ids) * weights[:, None]).sum()
        rows = sparsejax.value_and_grad(loss)(table)[1].value.rows
        return rows[None]

    specs = (table.specs(), P("data"), P("data"))
    call = helpers.shard_map(on_rank, mesh=mesh_of(2), in_specs=specs, out_specs=P("data"))
    weights = np.ones(600, jnp.bfloat16)  # in bfloat16 1 + 1 + ... ends at 256
    rows = np.asarray(jax.jit(call)(table, np.zeros(600, np.int32), weights))
    assert rows.dtype == jnp.bfloat16
    assert sorted({*rows.astype(np.float32).reshape(-1)}) == [0, 300]


def test_a_weight_of_zero_keeps_a_gradient_out_whatever_it_is():
    def weighed(table, weight, factor):
        def loss(table):
            vectors = column_lookup(table.with_weight(weight), jnp.array([1, 2]))
            return (vectors * factor).sum(), vectors

        evaluate = sparsejax.value_and_grad(loss, has_aux=True)
        (_, vectors), grads = evaluate(table)
        return grads.value.to_dense(), grads.value.ids, vectors

    weights, factors = np.array([0, 2], np.float32), np.array([np.nan, 3], np.float32)
    _, (grads, listed, vectors) = one_by_one(weighed, 2, weights, factors)
    assert sorted(listed[0]) == [1, 2, 9, 9]  # the first rank reads no rows
    assert not vectors[0].any()
    assert vectors[1].all()
    grads = np.moveaxis(grads, 0, 1).reshape(9, -1)[:, :5]
    assert (grads[1:3] == 6).all()
    assert not grads[3:].any()


def test_a_dense_gradient_is_said_to_be_that_of_a_column_lookup():
    tables = {"users": ColumnTable.of(np.ones((20, 4), np.float32), mesh_of(2))}
    read = lambda tables, ids: sparsejax.column_lookup(tables["users"], ids).sum()

    def whole(tables, ids):
        return read(tables, ids) + tables["users"].value.sum()

    def traced(loss, value_and_grad):
        own = sparsejax.state_specs(tables)
        mapped = helpers.shard_map(
            lambda tables, ids: value_and_grad(loss)(tables, ids)[1],
            mesh=mesh_of(2),
            in_specs=(own, P("data")),
            out_specs=own,
        )
        return jax.eval_shape(mapped, tables, jnp.arange(4))

    _said.clear()
    warning = sparsejax.errors.DenseGradientWarning
    with pytest.warns(warning, match=r"column_lookup of .* give column_lookup the param"):
        traced(read, jax.value_and_grad)
    match = r"column_lookup \(at .*test_column_lookup.py.* reads rows of 'users'.*stop_grad"
    with pytest.raises(sparsejax.errors.ArgumentError, match=match):
        traced(whole, sparsejax.value_and_grad)
