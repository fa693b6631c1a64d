"""Lists of rows with a capacity: the same step, whether rows fit or not."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors
from sparsejax.rows import lazy, within_capacity
from sparsejax.units.row_grads import RowGrads
from tests import helpers


HEIGHT, WIDTH, COUNT, ROOM = 200, 3, 24, 7
SHAPES = {"kernel": (5,), "other": (60, WIDTH), "table": (HEIGHT, WIDTH)}


@functools.cache
def program(n, check_vma):
    """A step of SGD on ranks: the parameters, and how long the lists of rows were."""
    rules = {"other|table": "row", "": "sparse"}
    tx = optax.chain(sparsejax.zen_sync(rules=rules), lazy(optax.sgd(1.0)))
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}

    def step(grads, params, state, length):
        del length
        updates, state = tx.update(grads, state, params)
        length = jnp.int32(grads["table"].capacity + grads["other"].capacity)
        return sparsejax.apply_updates(params, updates), state, length

    def on_rank(ids, rows, others, kernel):
        grads = {
            "kernel": kernel[0],
            "other": RowGrads.marked(others[0], rows[0], SHAPES["other"]),
            "table": RowGrads.marked(ids[0], rows[0], SHAPES["table"]),
        }
        carry = params, tx.init(params), jnp.int32(0)
        params_, state, length = within_capacity(
            step, grads, *carry, capacity={"table": ROOM}
        )
        by_rank = jax.tree.map(lambda x: x[None], params_)
        return params_, by_rank, length, sparsejax.metrics(state)

    specs = {"in_specs": P("data"), "out_specs": (P(), P("data"), P(), P())}
    mesh = helpers.mesh_of(n)
    return jax.jit(helpers.shard_map(on_rank, mesh=mesh, check_vma=check_vma, **specs))


def ids_of(n, distinct):
    """Ids int32 [n, COUNT]: of the last rank so many distinct rows, of others fewer."""
    rng = np.random.default_rng(distinct)
    ids = np.full((n, COUNT), HEIGHT)
    for rank in range(n):
        number = distinct if rank == n - 1 else min(distinct, rank + 1)
        own = rng.permutation(HEIGHT)[:number]
        ids[rank, : COUNT - 4] = np.resize(own, COUNT - 4)
    # No row of the table, and none that has to fit.
    ids[:, -3:] = [-1, HEIGHT + 1, 2**31 - 1]
    return rng.permuted(ids, axis=1).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "check_vma"), [(1, False), (3, True)])
def test_rows_that_fit_and_rows_that_do_not_are_the_same_step(n, check_vma):
    run = program(n, check_vma)
    rng = np.random.default_rng(n)
    for distinct, fits in ((ROOM - 1, True), (ROOM, True), (ROOM + 1, False), (15, False)):
        ids = ids_of(n, distinct)
        others = rng.integers(0, 60, ids.shape).astype(np.int32)
        # Whole numbers, whose sums and means are exact.
        rows = n * rng.integers(-8, 9, (*ids.shape, WIDTH)).astype(np.float32)
        rows[:, :2] = 0
        kernel = n * np.ones((n, 5), np.float32)
        params, by_rank, length, numbers = run(ids, rows, others, kernel)
        where = f"n={n}, {distinct} rows"
        assert length == (ROOM if fits else COUNT) + COUNT, where
        for name, listed in (("table", ids), ("other", others)):
            want = np.zeros(SHAPES[name])
            inside = (listed >= 0) & (listed < len(want))
            np.add.at(want, listed[inside], -rows[inside] / n)
            np.testing.assert_array_equal(params[name], want, err_msg=where)
        np.testing.assert_array_equal(params["kernel"], -n * np.ones(5))
        helpers.assert_same_on_all_ranks(by_rank)
        if n > 1:
            found = len(set(ids[(ids >= 0) & (ids < HEIGHT)])) + len(set(others.ravel()))
            after = numbers["sync/other and 1 more/density_after"]
            np.testing.assert_allclose(after, found / (HEIGHT + 60), rtol=1e-6)


@pytest.mark.slow
def test_what_is_for_one_way_is_not_computed_for_the_other():
    """In front of the loops no list is summed up."""
    shape = 10_000, 16
    params = {"table": jax.ShapeDtypeStruct(shape, jnp.float32)}
    tx = optax.chain(sparsejax.zen_sync(), lazy(optax.adam(1e-3)))

    def update(grads, params, state):
        updates, state = tx.update(grads, state, params)
        return sparsejax.apply_updates(params, updates), state

    def step(params, state, ids, rows):
        grads = {"table": RowGrads.marked(ids[0], rows[0], shape)}
        return within_capacity(update, grads, params, state, capacity=64)

    specs = {"in_specs": (P(), P(), P("data"), P("data")), "out_specs": P()}
    mapped = helpers.shard_map(step, mesh=helpers.mesh_of(2), **specs)
    ids = jax.ShapeDtypeStruct((2, 1024), jnp.int32)
    rows = jax.ShapeDtypeStruct((2, 1024, 16), jnp.float32)
    state = jax.eval_shape(tx.init, params)
    jitted = jax.jit(mapped, donate_argnums=(0, 1))
    text = jitted.lower(params, state, ids, rows).compile().as_text()
    entry = re.search(r"\nENTRY [^\n]*\n(.*?)\n}", text, re.DOTALL)
    made = re.findall(r"= f32\[(\d+),16\]\S* (\S+?)\(", entry[1])
    passed = {"parameter", "get-tuple-element", "bitcast", "copy"}
    assert not [line for line in made if line[1] not in passed]


def test_a_capacity_that_is_no_shorter_changes_nothing():
    grads = {"table": RowGrads.marked(jnp.zeros(5, jnp.int32), jnp.ones((5, 2)), (9, 2))}
    seen = []

    def step(grads, x):
        seen.append(grads["table"].ids)
        return x

    assert within_capacity(step, grads, 1.5, capacity=5) == 1.5
    assert seen == [grads["table"].ids]


@pytest.mark.parametrize(
    ("capacity", "error", "match"),
    [
        (0, errors.ArgumentError, "capacity must be a positive int, got 0"),
        (2.5, errors.ArgumentError, "capacity must be a positive int, got 2.5"),
        ({"tab": None}, errors.ArgumentError, "capacity of 'tab' must be a positive int"),
        ({"tab": 3, "kern": 3}, errors.RuleError, "'kern' matches no leaf .*: 'table'"),
    ],
)
def test_a_capacity_that_cannot_be_is_refused(capacity, error, match):
    ids, rows = jnp.zeros(5, jnp.int32), jnp.ones((5, 2))
    grads = {"table": RowGrads.marked(ids, rows, (9, 2)), "kernel": jnp.ones(2)}
    with pytest.raises(error, match=match):
        within_capacity(lambda grads, x: x, grads, 0.0, capacity=capacity)


def test_a_capacity_without_rows_is_refused():
    with pytest.raises(errors.ArgumentError, match=r"no gradient is RowGrads.*\.lazy"):
        within_capacity(lambda g, x: x, {"w": jnp.ones(2)}, 0.0, capacity=5)
