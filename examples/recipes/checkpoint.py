"""A checkpoint of four ranks, restored on four ranks, and on two."""

import pathlib
import tempfile

import jax
import optax

import sparsejax


jax.config.update("jax_num_cpu_devices", 4)  # simulated, where there are no GPUs
tx = optax.chain(sparsejax.top_k(0.05, min_size=1), sparsejax.zen_sync(), optax.sgd(0.1))
params = {"w": jax.random.normal(jax.random.key(1), (100, 16))}
batch = jax.random.normal(jax.random.key(0), (8, 100, 16))
loss_fn = lambda params, batch: optax.squared_error(params["w"] - batch).mean()
path = pathlib.Path(tempfile.mkdtemp(), "run", "10")


def train(ranks, restored=None):
    mesh = jax.make_mesh((ranks,), ("data",), devices=jax.devices()[:ranks])
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
    state = trainer.init(params)
    if restored is not None:
        state = sparsejax.restore(restored, like=state)
    for _ in range(10):
        state, loss = trainer.step(state, batch)
    print(f"{ranks} ranks, step {state.step}: loss {loss:.4f}")
    return state


sparsejax.save(path, train(4))
train(4, restored=path)
train(2, restored=path)
