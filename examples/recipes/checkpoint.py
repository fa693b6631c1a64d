"""orbax: save on four ranks, continue on four, and on two."""

import pathlib
import tempfile

import jax
import optax
import orbax.checkpoint as ocp

import sparsejax


jax.config.update("jax_num_cpu_devices", 4)  # simulated, where there are no GPUs
four = jax.make_mesh((4,), ("data",))
two = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
tx = optax.chain(sparsejax.top_k(0.05, min_size=1), sparsejax.zen_sync(), optax.sgd(0.1))
params = {"w": jax.random.normal(jax.random.key(1), (100, 16))}
batch = jax.random.normal(jax.random.key(0), (8, 100, 16))
loss_fn = lambda params, batch: optax.squared_error(params["w"] - batch).mean()


def train(mesh, state, steps=10):
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
    for _ in range(steps):
        state, loss = trainer.step(state, batch)
    return state, float(loss)


state, loss = train(four, sparsejax.data_parallel(loss_fn, tx, four).init(params))
path = pathlib.Path(tempfile.mkdtemp()) / "state"
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, state)
    checkpointer.wait_until_finished()
    for mesh in (four, two):
        fresh = sparsejax.data_parallel(loss_fn, tx, mesh).init(params)
        target = sparsejax.abstract_state(tx, params, mesh, ranks=4)
        state = checkpointer.restore(path, fresh._replace(opt_state=target))
        opt_state = sparsejax.resized(state.opt_state, like=fresh.opt_state)
        state = state._replace(opt_state=opt_state)
        print(f"loss {loss:.4f}, then loss {train(mesh, state)[1]:.4f}")
