"""Parameters in a dict, your own `shard_map`, and the bytes that were sent."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax


jax.config.update("jax_num_cpu_devices", 4)  # simulated, where there are no GPUs
mesh = jax.make_mesh((4,), ("data",))
# In place before the first step, so that one program serves all steps.
normal = jax.random.normal(jax.random.key(0), (1000, 16))
params = {"embedding": normal, "out": jnp.zeros((16, 10))}
params = jax.device_put(params, NamedSharding(mesh, P()))
ids = jax.device_put(jnp.arange(256) * 3 % 1000, NamedSharding(mesh, P("data")))
tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-2))
state = sparsejax.init(tx, params, mesh)
specs = (P(), sparsejax.state_specs(state), P("data"))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=specs, out_specs=(*specs[:2], P()))
def step(params, state, ids):
    def loss_fn(params):
        logits = params["embedding"][ids] @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids % 10).mean()

    loss, grads = jax.value_and_grad(loss_fn)(sparsejax.local(params))
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "data")


losses = []
for _ in range(20):
    params, state, loss = step(params, state, ids)
    losses.append(float(loss))
print(f"loss {losses[0]:.3f}, then loss {losses[-1]:.3f}")
print(f"bytes sent a step: {sparsejax.metrics(state)['sync/wire_bytes']:,.0f}")
