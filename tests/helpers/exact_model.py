"""A model on replicas of shards, trained under `jit`, whose gradients are exact.

Its loss is linear in the parameters, so its gradient depends on the batch alone. If batches
are small integers, sums are exact in any order.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sparsejax


AXES = ("replica", "fsdp")
SHAPES = {"table": (512, 8), "kernel": (16, 32), "bias": (32,)}
SPECS = {"table": P("fsdp", None), "kernel": P(None, "fsdp"), "bias": P(None)}
RULES = {"table|kernel": "sparse"}  # though they are small
BATCH = 16


def sync(**options: Any) -> optax.GradientTransformation:
    """Returns the model's synchronization, over its replicas."""
    return sparsejax.zen_sync("replica", reduce="sum", rules=RULES, **options)


def dgc(density: float = 0.1, **options: Any) -> optax.GradientTransformation:
    """Returns the model's sparsifier."""
    return sparsejax.dgc(density, axis_name="replica", min_size=100, **options)


def mesh_of(replicas: int, shards: int) -> Mesh:
    """Returns a mesh (replica, fsdp) over the first devices of the job."""
    sizes = replicas, shards
    return jax.make_mesh(sizes, AXES, devices=jax.devices()[: replicas * shards])


def place(x: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """Places an array, which each process has whole in memory, on a mesh."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])


def params_on(mesh: Mesh) -> dict[str, jax.Array]:
    """Returns the model's first parameters, zeros, on a mesh."""
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    return {name: place(x, mesh, SPECS[name]) for name, x in zeros.items()}


def batches(count: int, seed: int = 0, whole: bool = True) -> Iterator[dict[str, Any]]:
    """Yields batches in NumPy: of small integers, or of floats whose sums are rounded."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        x = rng.standard_normal(shape).astype(np.float32)
        return np.rint(4 * x) if whole else x

    for _ in range(count):
        yield {
            "ids": (rng.zipf(1.3, BATCH) % SHAPES["table"][0]).astype(np.int32),
            "inputs": draw(BATCH, SHAPES["kernel"][0]),
            "of_rows": draw(BATCH, SHAPES["table"][1]),
            "of_outputs": draw(BATCH, SHAPES["kernel"][1]),
        }


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Computes the loss, written as for explicit meshes."""
    out = P(AXES, None)
    rows = params["table"].at[batch["ids"]].get(out_sharding=out)
    product = functools.partial(jnp.einsum, "bi,io->bo", out_sharding=out)
    outputs = product(batch["inputs"], params["kernel"])
    spread = functools.partial(jax.lax.broadcast_in_dim, out_sharding=out)
    outputs += spread(params["bias"], outputs.shape, (1,))
    return jnp.sum(rows * batch["of_rows"]) + jnp.sum(outputs * batch["of_outputs"])


def gradient(batch: Any) -> dict[str, np.ndarray]:
    """Computes the gradient of the loss, in NumPy."""
    table = np.zeros(SHAPES["table"], np.float32)
    np.add.at(table, batch["ids"], batch["of_rows"])
    kernel = batch["inputs"].T @ batch["of_outputs"]
    return {"table": table, "kernel": kernel, "bias": batch["of_outputs"].sum(0)}


class Run:
    """A training run under `jit`.

    Attributes:
        mesh: The mesh.
        params: The parameters.
        state: The state of the transformation.
    """

    def __init__(self, tx: optax.GradientTransformation, mesh: Mesh):
        self.mesh, self.params = mesh, params_on(mesh)
        self.state = sparsejax.init(tx, self.params)

        @jax.jit
        def step(params, state, batch):
            grads = jax.grad(loss_fn)(sparsejax.local(params, AXES), batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self._step = step

    def train(self, batches: Any) -> "Run":
        """Takes a step for each batch, and returns the run."""
        with jax.set_mesh(self.mesh):
            for batch in batches:
                placed = {k: place(x, self.mesh, P(AXES)) for k, x in batch.items()}
                self.params, self.state = self._step(self.params, self.state, placed)
        return self
