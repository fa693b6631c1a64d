"""A model with tables, which are sharded by columns or not, and its batches."""

import jax.numpy as jnp
import numpy as np

from sparsejax.embrace import ColumnTable, column_lookup
from tests.helpers import mesh_of


HEIGHT, DIM, SHARE = 60, 13, 10
TABLES = ("adagrad", "adam", "sgd")


def params(n, sharded):
    """A table for each optimizer, and a kernel that is on all ranks."""
    rng = np.random.default_rng(0)
    made = {k: rng.normal(size=(HEIGHT, DIM)).astype(np.float32) for k in TABLES}
    kernel = rng.normal(size=(DIM, 1)).astype(np.float32)
    if sharded:
        made = {k: ColumnTable.of(x, mesh_of(n)) for k, x in made.items()}
    return made | {"kernel": kernel}


def loss_fn(params, batch):
    """A mean over the examples that are there; NaN on a rank without any."""
    ids = {k: batch["ids"][:, at] for at, k in enumerate(TABLES)}
    if isinstance(params["sgd"], ColumnTable):
        vectors = column_lookup({k: params[k] for k in TABLES}, ids)
    else:
        vectors = {k: jnp.take(params[k], ids[k], axis=0) for k in TABLES}
    hidden = jnp.tanh(sum(vectors.values(), jnp.zeros(())))
    errors = jnp.square((hidden @ params["kernel"])[:, 0] - batch["y"])
    return jnp.sum(jnp.where(batch["mask"], errors, 0)) / jnp.sum(batch["mask"])


def batch_of(step, n, uneven=True):
    """Ids of which a few are frequent; some ranks have fewer examples, and one has none."""
    rng = np.random.default_rng(step)
    ids = (rng.zipf(1.4, (n * SHARE, len(TABLES))) % HEIGHT).astype(np.int32)
    mask = np.ones((n, SHARE), bool)
    if uneven and n > 1:
        mask[step % n] = False
        mask[(step + 1) % n, : SHARE // 2] = False
    y = rng.normal(size=n * SHARE).astype(np.float32)
    return {"ids": ids, "y": y, "mask": mask.reshape(-1)}
