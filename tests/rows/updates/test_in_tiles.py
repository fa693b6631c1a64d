"""Long lists are worked on tile by tile, and what a loss has read is caught up once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

from sparsejax.errors import ArgumentError
from sparsejax.rows import apply_updates, lazy, tiles, value_and_grad, within_capacity
from sparsejax.rows.updates.catch_up.fading import Fading
from sparsejax.rows.updates.snapshot import Snapshot
from sparsejax.units.merging import merged
from sparsejax.units.row_grads import RowGrads
from tests import helpers
from tests.rows.updates import runs


OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "16 bits of a state": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_in_tiles_is_the_dense_run(name, monkeypatch):
    """Of lists of 6 places, in tiles of 2, of which each step fills some."""
    monkeypatch.setattr(tiles, "_SHORT", 1)
    monkeypatch.setattr(tiles, "_MOST", 4)
    monkeypatch.setattr(tiles, "_NUMBERS", 1)
    cuts, cut = [], tiles.Tile.cut
    monkeypatch.setattr(tiles.Tile, "cut", lambda *a: cuts.append(a[1]) or cut(*a))
    runs.check_run(OPTIMIZERS[name])
    assert cuts


HEIGHT = 50
PARAMS = {"table": jnp.asarray(np.random.default_rng(0).normal(size=(HEIGHT, 3)))}


def loss(p, ids):
    return jnp.sum((p["table"][ids] - 1) ** 2)


def stepped(tx, how):
    """A step whose gradient comes in some way, and its reader, or none, to the update."""

    def step(p, state, ids):
        read = tx.reader(p, state) if how != "not read" else None
        _, grads = value_and_grad(loss, read=read)(p, ids)
        if how == "of another reader":
            read = tx.reader(p, state)
        if how == "other ids":
            some = jnp.concatenate([grads["table"].ids, jnp.array([1], jnp.int32)])
            rows = jnp.pad(grads["table"].rows, ((0, 1), (0, 0)))
            grads = {"table": RowGrads(some, rows, (HEIGHT, 3))}

        def update(grads, p, state):
            updates, state = tx.update(grads, state, p, read=read)
            return apply_updates(p, updates), state

        if how == "within a capacity":
            return within_capacity(update, grads, p, state, capacity=2)
        return update(grads, p, state)

    return step


@pytest.mark.parametrize(
    ("how", "times", "of_sums"),
    [
        ("read", 1, 1),
        *helpers.slow(
            ("not read", 1, 1),
            ("of another reader", 2, 2),
            ("other ids", 2, 1),
            ("within a capacity", 3, 1),
        ),
    ],
)
def test_rows_are_caught_up_once_if_they_are_those_that_were_read(
    how, times, of_sums, monkeypatch
):
    """By count, where that takes steps one by one; the sums of others need no rows."""
    made, caught_up = [], Snapshot.caught_up
    counted = lambda *a: made.append(a[1]) or caught_up(*a)
    monkeypatch.setattr(Snapshot, "caught_up", counted)
    sums, sums_of = [], Fading.sums
    monkeypatch.setattr(Fading, "sums", lambda *a: sums.append(1) or sums_of(*a))
    for inner in optax.lion(1e-2), optax.adam(1e-2):
        tx = lazy(inner)
        like = PARAMS, tx.init(PARAMS), jnp.zeros((2, 4), jnp.int32)
        jax.jit(stepped(tx, how)).lower(*like)
    assert made == [0] * (times + (how != "not read"))
    assert len(sums) == of_sums


@pytest.mark.slow
def test_a_reader_of_another_optimizer_is_not_used_and_what_is_none_is_refused():
    one, other = lazy(optax.lion(0.1)), lazy(optax.lion(0.2))
    p, state = PARAMS, one.init(PARAMS)
    rows = lambda *ids: RowGrads(jnp.array(ids), jnp.ones((len(ids), 3)), (HEIGHT, 3))
    update = jax.jit(one.update)
    for at in 1, 2, 3:  # what the first has missed is not the same at another rate
        updates, state = update({"table": rows(at)}, state, p)
        p = apply_updates(p, updates)

    @functools.partial(jax.jit, static_argnums=0)
    def updated(read_by):
        read = read_by.reader(p, state)
        _, grads = value_and_grad(lambda p, ids: p["table"][ids].sum(), read=read)(
            p, jnp.array([[1, 2]])
        )
        return one.update(grads, state, p, read=read)

    jax.tree.map(np.testing.assert_array_equal, updated(one), updated(other))
    with pytest.raises(ArgumentError, match=r"lazy: read must be what reads.* got a int"):
        one.update(PARAMS, state, PARAMS, read=3)


@pytest.mark.parametrize("is_late", [True, *helpers.slow(False)])
def test_a_reader_of_another_step_is_reported_under_checkify(is_late):
    tx = lazy(optax.adam(0.1))

    def step(p, state):
        read = tx.reader(p, state)
        _, grads = value_and_grad(loss, read=read)(p, jnp.array([[1, 2]]))
        if is_late:
            _, state = tx.update(grads, state, p)
        return tx.update(grads, state, p, read=read)

    run = jax.jit(checkify.checkify(step, errors=checkify.user_checks))
    error, _ = run(PARAMS, tx.init(PARAMS))
    assert ("read must be a reader of the state" in (error.get() or "")) == is_late


@pytest.mark.parametrize("height", [40, 100_000])
def test_a_merge_has_room_to_spare(height):
    """By flags and by a sort."""
    ids = jnp.array([7, 3, 39, 3, -1, height], jnp.int32)
    merge = merged(ids, height, room=8)
    np.testing.assert_array_equal(merge.ids, [3, 7, 39, *[height] * 5])
    np.testing.assert_array_equal(merge.places, [1, 0, 2, 0, 8, 8])
    assert merge.found == 3
    sums = merge.sums(jnp.arange(6.0)[:, None])
    np.testing.assert_array_equal(sums[:, 0], [4, 0, 2, 0, 0, 0, 0, 0])
