"""One process of a job that trains under `jit`, or the same job on simulated devices.

    python -m tests.laws.in_jit_worker OUT [COORDINATOR RANK]

The mesh has two replicas of two shards each. With a coordinator there are two processes
with a replica each; without one there are four simulated devices. The shards that this
process has of parameters and states, and all metrics, go to OUT, as .npz.
"""

import sys

import jax


REPLICAS, SHARDS = 2, 2


def main(out, coordinator=None, rank=0):
    jax.config.update("jax_platforms", "cpu")
    devices = SHARDS if coordinator else REPLICAS * SHARDS
    jax.config.update("jax_num_cpu_devices", devices)
    if coordinator is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            coordinator,
            REPLICAS,
            rank,
            initialization_timeout=60,
            heartbeat_timeout_seconds=60,
        )
    # After the backend is settled: these make arrays.
    import numpy as np
    import optax

    import sparsejax
    from tests.helpers import exact_model

    mesh = exact_model.mesh_of(REPLICAS, SHARDS)
    of_replica = [{device.process_index for device in row} for row in mesh.devices]
    assert of_replica == [{0}, {1 if coordinator else 0}]
    chains = {
        "zen": (exact_model.sync(), optax.adam(0.01)),
        "dgc": (exact_model.dgc(0.01), exact_model.sync(), optax.adam(0.01)),
    }
    held = {}
    for name, parts in chains.items():
        run = exact_model.Run(optax.chain(*parts), mesh)
        run.train(exact_model.batches(4, whole=False))
        arrays = {"params": run.params, "state": run.state}
        for keys, leaf in jax.tree_util.tree_leaves_with_path(arrays):
            for shard in leaf.addressable_shards:
                key = f"{name}{jax.tree_util.keystr(keys)} {shard.index}"
                held[key] = np.asarray(shard.data)
        # On the mesh of all processes JAX computes with no array of one device.
        with jax.set_mesh(mesh):
            of_mesh, shown = sparsejax.metrics(run.state), sparsejax.summary(run.state)
        assert shown == sparsejax.summary(run.state)
        for metric, value in sparsejax.metrics(run.state).items():
            held[f"{name} {metric}"] = np.asarray(value)
            assert (
                held[f"{name} {metric}"].tobytes() == np.asarray(of_mesh[metric]).tobytes()
            )
    np.savez(out, **held)
    if coordinator is not None:
        jax.distributed.shutdown()


if __name__ == "__main__":
    out, *rest = sys.argv[1:]
    main(out, *rest[:1], *map(int, rest[1:]))
