"""One process of a job that trains, saves its shards, and goes on; or of one that goes on.

    python -m tests.checkpoints.worker OUT FOLDER RANKS [COORDINATOR RANK]

With a coordinator there are as many processes as ranks, of one device each; without one
there are simulated devices. Where FOLDER is not there yet, two steps are taken and saved.
Then the checkpoint is restored, one more step is taken, and what this process holds of the
state goes to OUT, as .npz.
"""

import pathlib
import sys

import jax

from tests.helpers import processes


def main(out, folder, ranks, coordinator=None, rank=0):
    processes.take_part(ranks, ranks, coordinator, rank)
    # After the backend is settled: these make arrays.
    import jax.numpy as jnp
    import numpy as np
    import optax

    import sparsejax
    from tests.helpers import mesh_of

    def loss_fn(params, batch, *, variables, key):
        noise = 0.1 * jax.random.normal(key, (3,))
        vectors = sparsejax.column_lookup(params["table"], batch["ids"])
        out = jnp.tanh(batch["x"] @ params["kernel"]) + vectors[:, :3] + noise
        loss = jnp.mean((out - batch["y"]) ** 2)
        return loss, {"seen": variables["seen"] + out.sum()}

    sparsifier = sparsejax.dgc(0.1, min_size=1, memory=sparsejax.MomentumCorrection())
    each = {
        "rest": optax.chain(sparsifier, sparsejax.zen_sync(), optax.sgd(0.1)),
        "table": optax.chain(sparsejax.zen_sync(), optax.adam(0.1)),
    }
    tx = optax.partition(each, {"kernel": "rest", "table": "table"})
    mesh = mesh_of(ranks)
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh, variables="by_rank")
    values = np.linspace(-1, 1, 50, dtype=np.float32).reshape(10, 5)
    params = {
        "kernel": np.linspace(-1, 1, 60, dtype=np.float32).reshape(20, 3),
        "table": sparsejax.ColumnTable.of(values, mesh),
    }
    variables = {"seen": np.float32(0)}

    def batch_of(step):
        rng = np.random.default_rng(step)
        draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
        batch = {"x": draw(8, 20), "y": draw(8, 3), "ids": rng.integers(0, 10, 8)}
        if coordinator is None:
            return batch
        return {name: np.split(x, ranks)[rank] for name, x in batch.items()}

    fresh = lambda: trainer.init(params, variables=variables, key=jax.random.key(5))
    folder = pathlib.Path(folder)
    if not folder.exists():
        state = fresh()
        for step in range(2):
            state, _ = trainer.step(state, batch_of(step))
        # Twice, so that one takes the place of another.
        sparsejax.save(folder, {"state": state, "epoch": 3}, about={"seed": 5})
        sparsejax.save(
            folder, {"state": state, "epoch": 4}, about={"seed": 5}, replace=True
        )
    like = {"state": fresh(), "epoch": 0}
    restored = sparsejax.restore(folder, like, about={"seed": 5})
    assert restored["epoch"] == 4
    state, loss = trainer.step(restored["state"], batch_of(2))
    assert int(state.step.addressable_data(0)) == 3
    held = {"loss": np.asarray(loss.addressable_data(0))}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state._replace(key=None)):
        for shard in leaf.addressable_shards:
            held[f"{jax.tree_util.keystr(keys)} {shard.index}"] = np.asarray(shard.data)
    np.savez(out, **held)


if __name__ == "__main__":
    out, folder, ranks, *job = sys.argv[1:]
    main(out, folder, int(ranks), *job[:1], *map(int, job[1:]))
