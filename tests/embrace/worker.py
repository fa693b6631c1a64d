"""One process of a job with tables that are sharded by columns, or the same job in one.

    python -m tests.embrace.worker OUT [COORDINATOR RANK]

With a coordinator there are two processes of one device, and each gives its own half of a
batch; without one there are two devices. Writes what a process holds of the tables, and of
what the optimizer keeps of them, to OUT, as .npz.
"""

import itertools
import sys

import jax

from tests.helpers import processes


RANKS = 2


def main(out, coordinator=None, rank=0, scheduled=False):
    processes.take_part(RANKS, RANKS, coordinator, rank)
    # After the backend is settled: these make arrays.
    import numpy as np
    import optax
    import pytest

    import sparsejax
    from sparsejax.errors import ArgumentError, JobError
    from tests.embrace import model
    from tests.helpers import mesh_of

    rows = sparsejax.lazy(optax.adam(1e-2), exact=False)
    tx = optax.chain(sparsejax.zen_sync(), rows)
    if scheduled:  # in both dimensions
        label = lambda name: "rows" if name in model.TABLES else "rest"
        each = {"rows": rows, "rest": optax.adam(1e-2)}
        by_label = optax.partition(each, lambda params: {k: label(k) for k in params})
        tx = optax.chain(sparsejax.embrace_sync(delayed=4), by_label)
        tx = sparsejax.embrace.horizontal(tx, ["kernel"])
    trainer = sparsejax.data_parallel(model.loss_fn, tx, mesh_of(RANKS))
    state = trainer.init(model.params(RANKS, sharded=True))
    batches = [model.batch_of(step, RANKS, uneven=False) for step in range(4)]
    if coordinator is not None:
        part = lambda x: np.split(x, RANKS)[rank]
        batches = [{name: part(x) for name, x in batch.items()} for batch in batches]
    for batch, following in itertools.pairwise(batches):
        told = (following,) if scheduled else ()
        state, loss = trainer.step(state, batch, *told)
    held = {"loss": np.asarray(loss.addressable_data(0))}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        if leaf.ndim >= 2:
            for shard in leaf.addressable_shards:
                name = f"{jax.tree_util.keystr(keys)} {shard.index}"
                held[name] = np.asarray(shard.data)
    table = state.params["sgd"]
    again = sparsejax.ColumnTable.of(table.whole(), mesh_of(RANKS))
    np.testing.assert_array_equal(again.whole(), table.whole())
    even = np.arange(60 * 14, dtype=np.float32).reshape(60, 14)
    auto = jax.make_mesh((RANKS,), ("data",), (jax.sharding.AxisType.Auto,))
    for mesh in (auto, mesh_of(RANKS)):
        table_of_even = sparsejax.ColumnTable.of(even, mesh)
        np.testing.assert_array_equal(table_of_even.whole(), even)
    if coordinator is not None:
        with pytest.raises(JobError, match=r"hash .* 0\), and float32\[60, 14\] of hash"):
            sparsejax.ColumnTable.of(even + rank, mesh_of(RANKS))
        key = jax.random.key(rank)
        with pytest.raises(JobError, match=r"its key is key<fry> \[0, 0\] on host"):
            sparsejax.ColumnTable.create(key, 60, 14, mesh_of(RANKS))
        with pytest.raises(ArgumentError, match=r"float32\[60, 14\] .* other processes"):
            sparsejax.ColumnTable.of(table.value, mesh_of(RANKS))
    np.savez(out, **held)
    if coordinator is not None:
        jax.distributed.shutdown()


if __name__ == "__main__":
    out, *rest = sys.argv[1:]
    main(out, *rest[:1], *(int(rank) for rank in rest[1:]))
