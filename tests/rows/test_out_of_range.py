"""What a lookup reads for ids out of range, and where its gradient goes, as by JAX."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax

import sparsejax
from sparsejax.units.row_grads import is_row_grads
from tests import helpers


HEIGHT, WIDTH = 12, 3
INT = np.iinfo(np.int32)
# Each is one list of ids. The longest lists are as long as the table is high, where the
# gradient is dense.
LISTS = {
    "in range": [0, 3, 3, HEIGHT - 1],
    "the height": [0, HEIGHT, 3, HEIGHT],
    "above": [2, HEIGHT + 5, INT.max, 2],
    "from the end": [-1, -HEIGHT, 5, -1],
    "below": [1, -HEIGHT - 1, INT.min, -2 * HEIGHT],
    "none in range": [HEIGHT, INT.max, -HEIGHT - 1, INT.min],
    "as many as rows": [0, HEIGHT, -HEIGHT - 1, 3, *range(HEIGHT - 4)],
}


def _at(**how):
    return lambda table, ids: table.at[ids].get(**how)


def _take(**how):
    return lambda table, ids: jnp.take(table, ids, axis=0, **how)


def _gather(mode, reach):
    """Some rows from each start: XLA's own gather, whose ids do not wrap."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1, 2) if reach > 1 else (1,),
        collapsed_slice_dims=() if reach > 1 else (0,),
        start_index_map=(0,),
    )

    def look(table, ids):
        sizes = (reach, WIDTH)
        return lax.gather(table, ids[:, None], numbers, sizes, mode=mode)

    return look


def _linen(table, ids):
    return linen.Embed(HEIGHT, WIDTH).apply({"params": {"embedding": table}}, ids)


def _nnx(table, ids):
    embed = nnx.Embed(HEIGHT, WIDTH, rngs=nnx.Rngs(0))
    embed.embedding[...] = table
    return embed(ids)


READS = {
    "table[ids]": lambda table, ids: table[ids],
    "table[id], one by one": lambda table, ids: jax.vmap(lambda one: table[one])(ids),
    "table[ids] in a scan": lambda table, ids: lax.map(lambda one: table[one], ids),
    "table[ids] of a cast": lambda table, ids: (2 * table)[ids],
    "at.get": _at(),
    "at.get(promise_in_bounds)": _at(mode="promise_in_bounds"),
    "at.get(clip)": _at(mode="clip"),
    "at.get(fill)": _at(mode="fill"),
    "at.get(fill, 2)": _at(mode="fill", fill_value=2.0),
    "at.get(drop)": _at(mode="drop"),
    "at.get(no wrap)": _at(wrap_negative_indices=False),
    "take": _take(),
    "take(clip)": _take(mode="clip"),
    "take(wrap)": _take(mode="wrap"),
    "take(fill, 0)": _take(mode="fill", fill_value=0.0),
    "lookup": sparsejax.lookup,
    "dynamic_slice": lambda table, ids: lax.dynamic_slice_in_dim(table, ids[1], 2),
    "dynamic_index": lambda table, ids: table[ids[1]],
    "gather(promise)": _gather("promise_in_bounds", 1),
    "gather(promise, 2 rows)": _gather("promise_in_bounds", 2),
    "gather(clip, 2 rows)": _gather("clip", 2),
    "gather(fill, 2 rows)": _gather("fill", 2),
    "linen": _linen,
    "nnx": _nnx,
}
# One for each way in which ids out of range are treated.
ALWAYS = ["table[ids]", "at.get(fill, 2)", "at.get(no wrap)", "take(clip)", "take(wrap)"]
# JAX's gradient of a `lookup` is that of `jnp.take`, with a warning.
PLAIN = READS | {"lookup": _take()}


@functools.cache
def _params():
    numbers = np.random.default_rng(0).normal(size=(HEIGHT, WIDTH))
    return {"table": jnp.asarray(numbers, jnp.float32), "w": jnp.ones(WIDTH)}


def _loss(look):
    # What is read for an id out of range may be NaN, and is left out then.
    return lambda p, ids: jnp.nansum(jnp.sin(look(p["table"], ids) @ p["w"]))


def _check_gradients(names):
    """One program for all of them, and one for what JAX makes of them."""

    def taken(value_and_grad, reads):
        each = {name: value_and_grad(_loss(reads[name])) for name in names}
        return jax.jit(lambda p, ids: {name: of(p, ids) for name, of in each.items()})

    ours, theirs = taken(sparsejax.value_and_grad, READS), taken(jax.value_and_grad, PLAIN)
    for kind, ids in LISTS.items():
        ids = jnp.asarray(ids, jnp.int32)
        found, wanted = ours(_params(), ids), theirs(_params(), ids)
        for name in names:
            (value, grads), (want_value, want) = found[name], wanted[name]
            where, table = f"{name}, {kind}", grads["table"]
            dense = table.to_dense() if is_row_grads(table) else table
            np.testing.assert_allclose(value, want_value, rtol=1e-6, err_msg=where)
            np.testing.assert_allclose(dense, want["table"], rtol=1e-5, err_msg=where)
            np.testing.assert_allclose(grads["w"], want["w"], rtol=1e-5, err_msg=where)


@pytest.mark.parametrize("name", ALWAYS)
def test_a_gradient_by_rows_is_that_of_jax(name):
    _check_gradients([name])


@pytest.mark.slow
def test_gradients_by_rows_of_all_other_reads_are_those_of_jax():
    _check_gradients([name for name in READS if name not in ALWAYS])


SCALED = [
    "table[ids]",
    "at.get(promise_in_bounds)",
    "take(clip)",
    "take",
    "at.get(fill, 2)",
]


@pytest.mark.parametrize("name", SCALED)
def test_a_number_applied_to_the_table_has_the_gradient_of_jax(name):
    """JAX drops the gradient of rows out of range before it reaches the number."""

    def taken(value_and_grad):
        loss = lambda p, ids: _loss(READS[name])(
            p | {"table": p["scale"] * p["table"]}, ids
        )
        return jax.jit(value_and_grad(loss))

    ours, theirs = taken(sparsejax.value_and_grad), taken(jax.value_and_grad)
    params = _params() | {"scale": jnp.float32(1.5)}
    for kind, ids in LISTS.items():
        (_, grads), (_, want) = (of(params, jnp.asarray(ids)) for of in (ours, theirs))
        np.testing.assert_allclose(grads["scale"], want["scale"], rtol=1e-5, err_msg=kind)


# How a loss leaves out what it reads for padding.
MASKS = {
    "a factor": lambda rows, w, mask: (rows @ w) ** 2 * mask,
    "where, afterwards": lambda rows, w, mask: jnp.where(mask, (rows @ w) ** 2, 0.0),
    "where, before": lambda rows, w, mask: (jnp.where(mask[:, None], rows, 0.0) @ w) ** 2,
}
NAN = ("take", "nnx")


@pytest.mark.parametrize(
    ("name", "by"),
    [
        *itertools.product(["table[ids]", "take"], MASKS),
        # What reads as one of these does: each of them, and each mask.
        ("take(clip)", "a factor"),
        *helpers.slow(("take(fill, 0)", "where, afterwards"), ("nnx", "where, before")),
    ],
)
def test_padding_may_be_masked_afterwards_where_a_number_is_read(name, by):
    """As a batch without padding; of what reads NaN the weights' gradient is NaN."""
    own, padding = jnp.array([0, 3, 3]), jnp.array([HEIGHT, HEIGHT])

    def loss(p, ids):
        return jnp.sum(MASKS[by](READS[name](p["table"], ids), p["w"], ids < HEIGHT))

    padded = sparsejax.value_and_grad(loss)(_params(), jnp.concatenate([own, padding]))
    if name in NAN and by != "where, before":
        assert jnp.isnan(padded[1]["w"]).all()
        return
    value, grads = jax.value_and_grad(loss)(_params(), own)
    np.testing.assert_allclose(padded[0], value, rtol=1e-6)
    np.testing.assert_allclose(padded[1]["w"], grads["w"], rtol=1e-6)
    np.testing.assert_allclose(padded[1]["table"].to_dense(), grads["table"], rtol=1e-6)


def test_training_with_ids_out_of_range_is_that_of_the_dense_optimizer():
    """As where batches are padded with an id that no row has."""
    loss, tx = _loss(READS["table[ids]"]), optax.sgd(0.1, momentum=0.9)
    lazy = sparsejax.lazy(tx)

    @jax.jit
    def step(p, state, ids):
        read = lazy.reader(p, state)
        value, grads = sparsejax.value_and_grad(loss, read=read)(p, ids)
        updates, state = lazy.update(grads, state, p, read=read)
        return sparsejax.apply_updates(p, updates), state, value

    @jax.jit
    def dense_step(p, state, ids):
        value, grads = jax.value_and_grad(loss)(p, ids)
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state, value

    p, state, q, dense = _params(), lazy.init(_params()), _params(), tx.init(_params())
    lists = [ids for kind, ids in LISTS.items() if len(ids) < HEIGHT]
    for ids in 3 * lists:
        p, state, value = step(p, state, jnp.asarray(ids, jnp.int32))
        q, dense, want = dense_step(q, dense, jnp.asarray(ids, jnp.int32))
        np.testing.assert_allclose(value, want, rtol=1e-4)
    p, _ = sparsejax.rows.settle(p, state, lazy)
    np.testing.assert_allclose(p["table"], q["table"], rtol=1e-4, atol=1e-5)
