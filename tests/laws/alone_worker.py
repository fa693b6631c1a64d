"""One of two processes, of which the first alone reads a state: nothing may wait for both.

    python -m tests.laws.alone_worker COORDINATOR RANK

Both make a step. Then process 0 calls every function that takes a state, prints "alone",
and waits for no one; process 1 does nothing until its input ends.
"""

import sys

import jax
import jax.numpy as jnp
import optax


def main(coordinator, rank):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, rank, initialization_timeout=60)
    import sparsejax

    mesh = jax.make_mesh((2,), ("data",))
    chain = optax.chain(
        sparsejax.top_k(0.1, min_size=1), sparsejax.zen_sync(), optax.adam(1e-3)
    )
    tx = sparsejax.accumulate(chain, every=1)
    trainer = sparsejax.data_parallel(lambda p, b: jnp.sum(p["w"] * b), tx, mesh)
    params = {"w": jnp.ones((4096, 2))}
    state = trainer.init(params)
    share = jax.NamedSharding(mesh, jax.P("data"))
    batch = jax.make_array_from_process_local_data(share, jnp.ones((1, 1)))
    state, _ = trainer.step(state, batch)
    fresh, opt_state = trainer.init(params).opt_state, state.opt_state
    jax.block_until_ready((fresh, state))
    if rank == 0:
        metrics = sparsejax.metrics(opt_state)
        assert float(metrics["sparsify/residual_norm"]) > 0
        assert all(float(value) == float(value) for value in metrics.values())
        assert "all of 1 exchange" in sparsejax.summary(opt_state)
        jax.tree.leaves(sparsejax.residuals(opt_state))[0].addressable_data(0)
        sparsejax.state_specs(opt_state)
        sparsejax.abstract_state(tx, params, mesh)
        profiles = sparsejax.advise.profile_from_state(opt_state, params, ranks=2)
        assert all(float(p.counts[0]) >= 0 for p in profiles.values())
        whole = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            sparsejax.abstract_state(tx, params, mesh, ranks=3),
        )
        whole = jax.tree.map(
            lambda x: x + 3 if x.shape == () and x.dtype == "int32" else x, whole
        )
        sparsejax.resized(whole, like=fresh)
        print("alone", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
