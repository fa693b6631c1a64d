"""ZeRO-1: parameters and Adam's state sharded over the axis of the sum."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import sparsejax


jax.config.update("jax_num_cpu_devices", 4)  # simulated, where there are no GPUs
jax.set_mesh(jax.make_mesh((4,), ("data",)))
striped = sparsejax.rows.StripedRows(rows=20_000, shards=4)  # low rows are read most
normal = jax.random.normal(jax.random.key(0), (20_000, 16))
params = {"embedding": striped.stored(normal), "out": jnp.zeros((16, 10))}
params = jax.device_put(params, P("data", None))
tx = optax.chain(sparsejax.zen_sync("data", reduce="sum"), optax.adam(1e-2))
state = sparsejax.init(tx, params)


def loss_fn(params, ids):
    places = striped.places(ids)
    rows = params["embedding"].at[places].get(out_sharding=P("data", None))
    logits = jnp.einsum("bd,do->bo", rows, params["out"], out_sharding=P("data", None))
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids % 10).mean()


@jax.jit
def step(params, state, ids):
    loss, grads = jax.value_and_grad(loss_fn)(sparsejax.local(params, "data"), ids)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


ids, losses = jax.device_put(jnp.arange(256) ** 2 % 997, P("data")), []
for _ in range(20):
    params, state, loss = step(params, state, ids)
    losses.append(float(loss))
print(f"loss {losses[0]:.3f}, then loss {losses[-1]:.3f}")
print(f"bytes sent a step: {sparsejax.metrics(state)['sync/wire_bytes']:,.0f}")
