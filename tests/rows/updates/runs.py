"""200 steps of a small model with a table, by a dense optimizer and by a lazy one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax.rows import apply_updates, lazy, settle, value_and_grad
from sparsejax.units.row_grads import is_row_grads


STEPS, HEIGHT, WIDTH, LATE = 200, 40, 4, 35
FIRST_LATE = 150  # the step before which row LATE is not touched


@functools.cache
def batches():
    """Ids [steps, 6] of rows, and what they and a product with them should be.

    The ids are those of the first 30 rows but for one that comes late. Some repeat, and
    the last of each step is out of range. Targets are noise, so that gradients stay away
    from zero, where an optimizer that divides by their size would magnify all rounding.
    """
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.3, (STEPS, 6)) - 1, 29).astype(np.int32)
    ids[:, 5] = HEIGHT + 3
    ids[FIRST_LATE::7, 0] = LATE
    targets = rng.normal(size=(STEPS, 6, WIDTH + 3)).astype(np.float32)
    return ids, targets[..., :WIDTH], targets[..., WIDTH:]


def params(dtype=np.float32):
    rng = np.random.default_rng(1)
    shapes = {"b": (3,), "table": (HEIGHT, WIDTH), "w": (WIDTH, 3)}
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}


def loss(p, batch):
    ids, own, others = batch
    rows = jnp.take(p["table"], ids, axis=0, mode="fill", fill_value=0)
    # The third is listed, with a gradient of zero.
    weights = jnp.asarray([1, 1, 0, 1, 1, 1], rows.dtype)[:, None]
    made = jax.lax.stop_gradient(rows) @ p["w"] + p["b"]
    return jnp.sum(weights * (rows - own) ** 2) + jnp.mean((made - others) ** 2)


def dense_run(tx, dtype=np.float32):
    """The parameters after all steps, the losses on the way, and the state."""

    def step(carry, batch):
        p, state = carry
        value, grads = jax.value_and_grad(loss)(p, batch)
        updates, state = tx.update(grads, state, p)
        return (optax.apply_updates(p, updates), state), value

    with jax.enable_x64(dtype == np.float64):
        p = params(dtype)
        run = jax.jit(lambda p, s: jax.lax.scan(step, (p, s), batches()))
        (p, state), values = jax.tree.map(np.asarray, run(p, tx.init(p)))
    return p, values, state


def lazy_run(tx):
    """The same by rows, caught up at the end."""
    tx = lazy(tx)

    def step(carry, batch):
        p, state = carry
        read = tx.reader(p, state)
        value, grads = value_and_grad(loss, read=read)(p, batch)
        assert is_row_grads(grads["table"])
        updates, state = tx.update(grads, state, p, read=read)
        return (apply_updates(p, updates), state), value

    @jax.jit
    def run(p, state):
        (p, state), values = jax.lax.scan(step, (p, state), batches())
        return settle(p, state, tx), values

    (p, state), values = run(params(), tx.init(params()))
    return jax.tree.map(np.asarray, (p, values, state))


def check_run(tx):
    """A lazy run is as near to a dense one in float64 as one in float32, but for 4 ulp.

    Both round; a row that catches up rounds what it has missed at once, or in another
    program. The losses on the way show that rows are read as they should be.
    """
    truth, dense = dense_run(tx, np.float64), dense_run(tx)
    p, losses, state = lazy_run(tx)
    trees = map(jax.tree.leaves, (truth, dense, (p, losses, state.inner)))
    for want, rounded, got in zip(*trees, strict=True):
        ulp = np.spacing(np.float32(np.abs(want).max(initial=1e-30)))
        room = 2 * np.abs(rounded - want).max(initial=0) + 4 * ulp
        assert np.abs(got - want).max(initial=0) <= room
