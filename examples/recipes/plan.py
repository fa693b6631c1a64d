"""A plan: measure a few steps, choose a scheme for each leaf, and compile only that."""

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax


jax.config.update("jax_num_cpu_devices", 4)  # simulated, where there are no GPUs
mesh = jax.make_mesh((4,), ("data",))
normal = lambda *shape: jax.random.normal(jax.random.key(0), shape)
params = {"embedding": normal(20_000, 16), "out": normal(16, 10) / 4}
params = jax.device_put(params, NamedSharding(mesh, P()))
ids = jax.random.randint(jax.random.key(1), (256,), 0, 20_000)
ids = jax.device_put(ids, NamedSharding(mesh, P("data")))


def loss_fn(params, ids):
    logits = params["embedding"][ids] @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids % 10).mean()


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
def profile(params, ids):
    return sparsejax.profile(jax.grad(loss_fn)(sparsejax.local(params), ids))


seen = [profile(params, ids)]
plan = sparsejax.make_plan(seen, params, ranks=4, network=sparsejax.Network(25, 20))
plan.save("plan.json")  # for the runs to come: sparsejax.Plan.load("plan.json")
tx = optax.chain(sparsejax.sync(plan), optax.adam(1e-2))
trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
state = trainer.init(params)
losses = []
for _ in range(20):
    state, loss = trainer.step(state, ids)
    losses.append(float(loss))
print(plan, f"loss {losses[0]:.3f}, then loss {losses[-1]:.3f}", sep="\n")
