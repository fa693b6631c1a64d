"""One of two processes that give parameters, which may differ: both are told which.

    python -m tests.laws.disagreeing_worker COORDINATOR RANK

Nothing of a parameter's size may go between the two: whatever gathers it is an error here.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils


def main(coordinator, rank):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, rank, initialization_timeout=60)
    import sparsejax
    from sparsejax.errors import ArgumentError

    gathered, gather = [], multihost_utils.process_allgather

    def watched(x):
        gathered.append(x.nbytes)
        return gather(x)

    multihost_utils.process_allgather = watched
    multihost_utils.assert_equal = None

    def loss_fn(params, batch, key):
        del key
        return jnp.sum(params["w"] * batch)

    mesh = jax.make_mesh((2,), ("data",))
    tx = optax.chain(sparsejax.zen_sync(), optax.sgd(0.1))
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
    key = jax.random.key(3)
    alike = {
        "half": np.full((3, 1), 0.5, jnp.bfloat16),
        "number": 2.0,
        "w": jax.random.normal(key, (4096, 2)),
    }
    state = trainer.init(alike, key=key)
    for name, x in alike.items():
        got = np.asarray(state.params[name].addressable_data(0))
        assert got.dtype == jnp.result_type(x)
        assert got.tobytes() == np.asarray(x, got.dtype).tobytes(), name
    data = jax.random.key_data(state.key)
    assert np.array_equal(data.addressable_data(0), jax.random.key_data(key))

    other = alike | {"w": alike["w"].at[4000, 1].add(rank)}
    with pytest.raises(ArgumentError, match=r"init: process 1 .* 'params/w' .* one seed"):
        trainer.init(other, key=key)
    with pytest.raises(ArgumentError, match="process 1 gives other numbers for 'key'"):
        trainer.init(alike, key=jax.random.key(rank))
    higher = alike | {"w": np.zeros((4096 + rank, 2))}
    with pytest.raises(ArgumentError, match=rf"other leaves .*w \[{4096 + rank}, 2\]"):
        trainer.init(higher)
    with pytest.raises(ArgumentError, match="other leaves than process 0"):
        trainer.init(alike if rank else {"w": alike["w"]})
    # As it was restored: every process has all of it.
    restored = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), state.params)
    changed = restored | {"half": restored["half"] + rank}
    with pytest.raises(ArgumentError, match=r"step: process 1 .* 'params/half'"):
        trainer.step(state._replace(params=changed), np.ones((1, 1), np.float32))
    trainer.step(state._replace(params=restored), np.ones((1, 1), np.float32))
    assert len(gathered) == 10
    assert max(gathered) < 500
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
