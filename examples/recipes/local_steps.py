"""Local steps: ranks train independently, and exchange their offsets every ten steps."""

import jax
import jax.numpy as jnp
import optax

import sparsejax


jax.config.update("jax_num_cpu_devices", 8)  # simulated, where there are no GPUs
mesh = jax.make_mesh((8,), ("data",))


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    return optax.squared_error(hidden @ params["out"], batch["y"]).mean()


def batch_of(step):
    x = jax.random.normal(jax.random.key(step), (256, 16))
    return {"x": x, "y": jnp.sin(x[:, :1])}


# The anchor goes by the mean of what ranks have moved, sparse: the rest waits on its rank.
sync = optax.chain(sparsejax.top_k(0.25, min_size=0), sparsejax.zen_sync())
inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
tx = sparsejax.local_steps(inner, every=10, outer=optax.sgd(0.7), sync=sync)
trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
keys = jax.random.split(jax.random.key(0))
params = {"in": 0.3 * jax.random.normal(keys[0], (16, 64)), "out": jnp.zeros((64, 1))}
state = trainer.init(params)
for step in range(200):
    state, loss = trainer.step(state, batch_of(step))
    if step % 50 == 9:  # at the end of a round; `evaluate` is of the anchor
        print(f"step {step}: loss {trainer.evaluate(state, batch_of(1000)):.3f}")
sparsejax.check_replicas(state)
exchanges = sparsejax.metrics(state.opt_state)["sync/exchanges"]
print(f"{int(exchanges)} exchanges in {int(state.step)} steps")
