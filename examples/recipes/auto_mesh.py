"""FSDP on Auto axes, where XLA shards the loss; a sparse exchange along another axis."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax


jax.config.update("jax_num_cpu_devices", 8)  # simulated, where there are no GPUs
kinds = (AxisType.Auto, AxisType.Auto)
mesh = jax.make_mesh((4, 2), ("replica", "fsdp"), axis_types=kinds)
jax.set_mesh(mesh)
specs = {"embedding": P("fsdp", None), "out": P("fsdp", None)}
table = jax.random.normal(jax.random.key(0), (20_000, 16))
place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
params = jax.tree.map(place, {"embedding": table, "out": jnp.zeros((16, 10))}, specs)
tx = optax.chain(sparsejax.zen_sync("replica"), optax.adam(1e-2))
state = sparsejax.init(tx, params)


def loss_fn(params, ids):
    logits = params["embedding"][ids] @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids % 10).mean()


@jax.jit
def step(params, state, ids):
    value_and_grad = jax.value_and_grad(loss_fn)
    losses, grads = sparsejax.per_replica(value_and_grad, "replica", specs)(params, ids)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, losses.mean()


ids, losses = place(jnp.arange(256) * 3, P(("replica", "fsdp"))), []
for _ in range(20):
    params, state, loss = step(params, state, ids)
    losses.append(float(loss))
print(f"loss {losses[0]:.3f}, then loss {losses[-1]:.3f}")
