"""One process of a job that trains with `data_parallel`, or the same job in one process.

    python -m tests.training.worker OUT [COORDINATOR RANK]

With a coordinator there are two processes of two devices, and each gives its own half of a
batch; without one there are four devices, and a batch is given whole. In the last step the
second process has run out of data. Then it gives a NaN, at which both raise. Writes what
can be seen of the results to OUT, as .npz.
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
    import pytest

    import sparsejax
    from sparsejax.errors import ArgumentError, BadNumberError
    from tests import helpers
    from tests.training import model

    def own(batch):
        if coordinator is None:
            return batch
        return {name: np.split(x, PROCESSES)[rank] for name, x in batch.items()}

    trainer, state = model.trainer(), model.first()
    counts = [(2, 2, 2, 2), (2, 1, 2, 0), (2, 2, 0, 0)]
    results = {}
    for step, there in enumerate(counts):
        batch = own(model.batch_of(step, there))
        evaluated = trainer.evaluate(state, batch)
        state, stepped = trainer.step(state, batch)
        for name, (loss, aux) in {"step": stepped, "evaluate": evaluated}.items():
            results[f"{step}/{name}/loss"] = loss
            results |= {f"{step}/{name}/{key}": value for key, value in aux.items()}
    results["w"] = state.params["w"]
    results["average"] = state.variables["average"]["x"]
    results["steps"] = state.variables["steps"]
    results["seen"] = state.variables["seen"].value
    if coordinator is not None:
        short = {name: x[:-1] for name, x in batch.items()}
        fix = r"split over 4 ranks, .* has 2, .* which 2 must divide; .* \[3\] .*weight="
        with pytest.raises(ArgumentError, match=fix):
            trainer.step(state, short)
    seen = {key: _own_parts(value) for key, value in results.items()}
    # A NaN that the second process has given the last rank: both raise, and go on.
    chain = optax.chain(sparsejax.dense_sync(), optax.sgd(0.5))
    chain = sparsejax.skip_nonfinite(chain, report=True)
    loss_fn = lambda params, batch: params["w"] * batch["x"].mean()
    mesh = helpers.mesh_of(model.RANKS)
    trainer = sparsejax.data_parallel(loss_fn, chain, mesh)
    batch = own({"x": np.array([1, 2, 3, np.nan], np.float32)})
    with pytest.raises(BadNumberError, match=r"step 0: .* has a NaN on rank 3\.") as raised:
        trainer.step(trainer.init(model.PARAMS), batch)
    seen["said"] = np.frombuffer(str(raised.value).encode(), np.uint8)
    state, _ = trainer.step(raised.value.state, own({"x": np.ones(4, np.float32)}))
    seen["behind it"] = _own_parts(state.params["w"])
    np.savez(out, **{key.replace("/", " "): value for key, value in seen.items()})
    if coordinator is not None:
        jax.distributed.shutdown()


def _own_parts(x):
    """What this process holds of an array: of one that is sharded, its parts in order."""
    import numpy as np

    if x.is_fully_replicated:
        return np.asarray(x.addressable_data(0))
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


if __name__ == "__main__":
    out, *rest = sys.argv[1:]
    main(out, *rest[:1], *(int(rank) for rank in rest[1:]))
