"""flax.linen: `TrainState` with `sparsejax.bind`, and a step in a `shard_map`."""

import jax
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax


jax.config.update("jax_num_cpu_devices", 4)  # simulated, where there are no GPUs
mesh = jax.make_mesh((4,), ("data",))
model = nn.Sequential([nn.Embed(1000, 16), nn.Dense(10)])
ids = jax.random.randint(jax.random.key(0), (256,), 0, 1000)
params = model.init(jax.random.key(1), ids)
tx = optax.chain(sparsejax.dgc(0.1), sparsejax.zen_sync(), optax.adam(1e-2))
bound = sparsejax.bind(tx, mesh)
state = TrainState.create(apply_fn=model.apply, params=params, tx=bound)
specs = (sparsejax.state_specs(state), P("data"))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=specs, out_specs=(specs[0], P()))
def step(state, ids):
    def loss_fn(params):
        logits = state.apply_fn(params, ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids % 10).mean()

    loss, grads = jax.value_and_grad(loss_fn)(sparsejax.local(state.params))
    return state.apply_gradients(grads=grads), jax.lax.pmean(loss, "data")


places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
state, ids = jax.device_put((state, ids), places)  # one program serves all steps then
losses = []
for _ in range(20):
    state, loss = step(state, ids)
    losses.append(float(loss))
print(f"loss {losses[0]:.3f}, then loss {losses[-1]:.3f}")
