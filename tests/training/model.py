"""A loss function that uses all that `data_parallel` offers, and its trainer on 4 ranks.

The loss is the mean of `w * x` over the examples that `mask` keeps, and the gradient of `w`
the mean of x. The variables are a moving average, a counter, and what each rank has seen.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax
from tests import helpers


RANKS = 4
AUX = {"product": "stack", "drawn": "stack", "large": "sum", "share": "mean"}
KINDS = {"average": "mean", "steps": "mean", "seen": "by_rank"}
PARAMS = {"w": np.float32(1)}
LEARNING_RATE = 0.5


def loss_fn(params, batch, *, variables, key, train=True):
    x, mask = batch["x"], batch["mask"]
    product = x * params["w"] if train else -x
    loss = jnp.sum(jnp.where(mask, product, 0)) / jnp.sum(mask)
    aux = {
        "product": product,
        "drawn": jax.random.uniform(key),
        "large": jnp.sum(x > 2),
        "share": jnp.mean(mask.astype(jnp.float32)),
    }
    changed = {
        "average": {"x": 0.5 * (variables["average"]["x"] + x.mean())},
        "steps": variables["steps"] + 1,
        "seen": variables["seen"] + x.sum(),
    }
    return loss, (aux, changed)


def variables():
    return {"average": {"x": jnp.zeros(())}, "steps": jnp.int32(0), "seen": jnp.float32(0)}


@functools.cache
def trainer(weighted=True):
    return sparsejax.data_parallel(
        loss_fn,
        optax.chain(sparsejax.dense_sync(), optax.sgd(LEARNING_RATE)),
        helpers.mesh_of(RANKS),
        aux=AUX,
        variables=KINDS,
        weight=(lambda batch: batch["mask"].sum()) if weighted else None,
        eval_fn=functools.partial(loss_fn, train=False),
        donate=False,
    )


def first(weighted=True, seed=0):
    return trainer(weighted).init(PARAMS, variables=variables(), key=jax.random.key(seed))


def batch_of(step, there=(2, 2, 2, 2)):
    """Two examples a rank, of which so many are there."""
    x = np.random.default_rng(step).uniform(0, 4, 2 * RANKS).astype(np.float32)
    mask = np.concatenate([np.arange(2) < count for count in there])
    return {"x": x, "mask": mask}
