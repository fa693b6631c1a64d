"""flax.nnx: `sparsejax.bind` makes the state where `nnx.Optimizer` asks for it."""

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax


jax.config.update("jax_num_cpu_devices", 4)  # simulated, where there are no GPUs
mesh = jax.make_mesh((4,), ("data",))
rngs = nnx.Rngs(0)
model = nnx.Sequential(nnx.Embed(1000, 16, rngs=rngs), nnx.Linear(16, 10, rngs=rngs))
tx = sparsejax.bind(optax.chain(sparsejax.zen_sync(), optax.adam(1e-2)), mesh)
graph, state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))
specs = (sparsejax.state_specs(state), P("data"))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=specs, out_specs=(specs[0], P()))
def step(state, ids):
    model, optimizer = nnx.merge(graph, state)
    inside, params = nnx.split(model, nnx.Param)

    entropy = optax.softmax_cross_entropy_with_integer_labels
    loss_fn = lambda params: entropy(nnx.merge(inside, params)(ids), ids % 10).mean()
    loss, grads = jax.value_and_grad(loss_fn)(sparsejax.local(params))
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), jax.lax.pmean(loss, "data")


ids = jax.random.randint(jax.random.key(0), (256,), 0, 1000)
places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
state, ids = jax.device_put((state, ids), places)  # one program serves all steps then
losses = []
for _ in range(20):
    state, loss = step(state, ids)
    losses.append(float(loss))
print(f"loss {losses[0]:.3f}, then loss {losses[-1]:.3f}")
