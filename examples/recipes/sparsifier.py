"""DGC: one value in a hundred is sent, and the residual is added to later gradients."""

import jax
import jax.numpy as jnp
import optax

import sparsejax


jax.config.update("jax_num_cpu_devices", 4)  # simulated, where there are no GPUs
mesh = jax.make_mesh((4,), ("data",))


def loss_fn(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["inside"])
    return optax.squared_error(hidden @ params["out"], batch["y"]).mean()


# Momentum belongs to what is kept: an optimizer's own would apply it to what was sent late.
dgc = sparsejax.dgc(0.01, memory=sparsejax.MomentumCorrection(0.9))
tx = optax.chain(dgc, sparsejax.zen_sync(), optax.sgd(0.005))
tx = sparsejax.warm_up(tx, steps=5)  # all is sent while gradients change fast
keys = jax.random.split(jax.random.key(0), 4)
params = {
    "inside": jax.random.normal(keys[0], (64, 2048)) / 8,
    "out": jax.random.normal(keys[1], (2048, 1)) / 45,
}
x = jax.random.normal(keys[2], (256, 64))
batch = {"x": x, "y": jnp.sin(x[:, :1])}
trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
state = trainer.init(params)
losses = []
for _ in range(20):
    state, loss = trainer.step(state, batch)
    losses.append(float(loss))
print(f"loss {losses[0]:.3f}, then loss {losses[-1]:.3f}")
print(f"held back: {sparsejax.metrics(state.opt_state)['sparsify/residual_norm']:.3f}")
