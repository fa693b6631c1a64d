"""One process of a job that trains by local steps, or the same job in one process.

    python -m tests.rounds.worker OUT [COORDINATOR RANK]

With a coordinator there are two processes of two devices, and each gives its own half of a
batch; without one there are four devices. Writes the anchor of each step, its losses, and
the residuals and offsets that its own devices have to OUT, as .npz.
"""

import sys

import jax

from tests.helpers import processes


PROCESSES = 2


def main(out, coordinator=None, rank=0):
    processes.take_part(PROCESSES, 4, coordinator, rank)
    # After the backend is settled: these make arrays.
    import numpy as np
    import optax

    import sparsejax
    from tests.rounds import model

    own = lambda x: x if coordinator is None else np.split(x, PROCESSES)[rank]
    sync = optax.chain(sparsejax.top_k(0.25, min_size=0), sparsejax.zen_sync())
    tx = sparsejax.local_steps(optax.adam(0.02), every=3, sync=sync)
    mesh = jax.make_mesh((4,), ("data",))
    trainer = sparsejax.data_parallel(model.loss_fn, tx, mesh, check_every=3)
    state, results = trainer.init(model.first()), {}
    for step, batch in enumerate(model.batches(7, examples=4)):
        state, loss = trainer.step(state, jax.tree.map(own, batch))
        results[f"loss/{step}"] = loss
        results |= {f"anchor/{step}/{name}": x + 0 for name, x in state.params.items()}
    rows = lambda x: np.concatenate([one.data for one in x.addressable_shards])
    held = sparsejax.residuals(state.opt_state)
    results |= {f"held/{name}": rows(x) for name, x in held.items()}
    offset = state.opt_state.offset.value
    results |= {f"offset/{name}": rows(x) for name, x in offset.items()}
    # Once more, with exchanges beside the steps.
    late = {"fragments": 2, "delay": 2, "blend": 0.5}
    tx = sparsejax.local_steps(optax.adam(0.02), every=4, sync=sync, **late)
    trainer = sparsejax.data_parallel(model.loss_fn, tx, mesh, overlap=True)
    state = trainer.init(model.first())
    for step, batch in enumerate(model.batches(7, examples=4)):
        state, _ = trainer.step(state, jax.tree.map(own, batch))
        results |= {f"late/{step}/{name}": x + 0 for name, x in state.params.items()}
    sparsejax.check_replicas(state)
    np.savez(out, **{name: np.asarray(x) for name, x in results.items()})
    if coordinator is not None:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
