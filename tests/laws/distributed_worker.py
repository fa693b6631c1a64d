"""One process of a `jax.distributed` job, or the same job on simulated devices.

    python -m tests.laws.distributed_worker OUT RANKS [COORDINATOR RANK]

Without a coordinator the ranks are simulated devices of this process. Writes to OUT what
rank RANK holds at the end, as one .npz.
"""

import sys

import jax


def main(out, ranks, coordinator=None, rank=0):
    jax.config.update("jax_platforms", "cpu")
    if coordinator is None:
        jax.config.update("jax_num_cpu_devices", ranks)
    else:
        jax.config.update("jax_num_cpu_devices", 1)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            coordinator,
            ranks,
            rank,
            initialization_timeout=60,
            heartbeat_timeout_seconds=60,
        )
    # After the backend is settled: these make arrays.
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P

    from sparsejax import schemes
    from sparsejax.units.dense import Dense
    from sparsejax.wire.collectives import Wire

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = NamedSharding(mesh, P("data"))
    results = {}
    for name, scheme in {
        "balanced": schemes.BalancedParallelism(),
        "hierarchical": schemes.HierarchicalCentralization(),
    }.items():

        def on_rank(x, scheme=scheme):
            like, wire = jax.ShapeDtypeStruct(x.shape[1:], x.dtype), Wire("data")
            done = scheme(Dense(x[0]), scheme.init(like, wire), wire)
            return done._replace(state=None)

        run = jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=P("data"), out_specs=P()))
        cases = {density: ((5000,), density) for density in (0.003, 0.2, 1.0)}
        # Messages so long that they take another way than short ones.
        cases["rows"] = ((2048, 256), 0.3)
        for case, (shape, density) in cases.items():
            rng = np.random.default_rng(5)
            mask = rng.random((ranks, shape[0])) < density
            mask = mask.reshape(*mask.shape, *[1] * (len(shape) - 1))
            x = np.where(mask, rng.standard_normal((ranks, *shape)), 0).astype(np.float32)
            placed = jax.make_array_from_callback(x.shape, sharding, lambda at, x=x: x[at])
            reduced = run(placed)
            results[f"{name}_{case}_total"] = reduced.total.addressable_data(0)
            results[f"{name}_{case}_wire"] = reduced.traffic.wire.addressable_data(0)
    np.savez(out, **{key: np.asarray(value) for key, value in results.items()})
    if coordinator is not None:
        jax.distributed.shutdown()


if __name__ == "__main__":
    out, ranks, *rest = sys.argv[1:]
    main(out, int(ranks), *rest[:1], *(int(rank) for rank in rest[1:]))
