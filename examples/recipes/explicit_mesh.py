"""FSDP under `nnx.jit`: shards along one axis, a sparse exchange along another."""

import jax
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import sparsejax


jax.config.update("jax_num_cpu_devices", 8)  # simulated, where there are no GPUs
jax.set_mesh(jax.make_mesh((4, 2), ("replica", "fsdp")))
BATCH, SHARDED = ("replica", "fsdp"), {"out_sharding": ("fsdp", None)}
options = {"use_bias": False, "kernel_metadata": SHARDED, "rngs": nnx.Rngs(0)}
embed = nnx.Embed(20_000, 16, embedding_metadata=SHARDED, rngs=nnx.Rngs(1))
model = nnx.Dict(embed=embed, head=nnx.Linear(16, 10, **options))
dgc = sparsejax.dgc(0.001, axis_name="replica")
tx = optax.chain(dgc, sparsejax.zen_sync("replica", reduce="sum"), optax.adam(1e-2))
init = lambda params: sparsejax.init(tx, nnx.as_pure(params))  # Residuals are arrays.
bound = optax.GradientTransformationExtraArgs(init, tx.update)
optimizer = nnx.Optimizer(model, bound, wrt=nnx.Param)


@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer, ids):
    def loss_fn(model):
        logits = model.head(model.embed(ids, out_sharding=P(BATCH)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids % 10).mean()

    graph, params = nnx.split(model)
    local = nnx.merge(graph, sparsejax.local(params, BATCH))
    loss, grads = nnx.value_and_grad(loss_fn)(local)
    optimizer.update(model, grads)
    return loss


ids = jax.device_put(jax.random.randint(jax.random.key(0), 256, 0, 20_000), P(BATCH))
losses = [float(step(model, optimizer, ids)) for _ in range(20)]  # waits for each step
print(f"loss {losses[0]:.3f}, then loss {losses[-1]:.3f}")
