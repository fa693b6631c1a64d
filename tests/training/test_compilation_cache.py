"""What one process has compiled, the next finds: JAX's cache of compiled programs."""

import sys

import pytest

from tests.helpers import processes


def main(folder):
    """Trains one step of a table in a process of its own, with its cache in a folder."""
    import jax

    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_compilation_cache_dir", folder)

    import jax.numpy as jnp
    import numpy as np
    import optax

    import sparsejax

    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))

    def loss_fn(params, batch):
        return jnp.mean(jnp.square(params["embedding"][batch].sum(-1)))

    tx = optax.chain(sparsejax.zen_sync(), optax.sgd(0.1))
    trainer = sparsejax.data_parallel(loss_fn, tx, jax.make_mesh((4,), ("data",)))
    state = trainer.init({"embedding": jnp.zeros((4000, 64))})
    _, loss = trainer.step(state, np.zeros(512, np.int32))
    jax.block_until_ready(loss)
    print("found", hits.count("/jax/compilation_cache/cache_hits"))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_second_process_takes_the_step_that_the_first_compiled(tmp_path):
    found = []
    for _ in range(2):
        worker = processes.start(__name__, tmp_path)
        output, _ = worker.communicate(timeout=processes.TIMEOUT)
        assert worker.returncode == 0, output
        found.append(int(output.split("found")[1]))
        assert [path.name.split("-")[0] for path in tmp_path.glob("*-cache")] == [
            "jit_step"
        ]
    assert found == [0, 1]


if __name__ == "__main__":
    main(*sys.argv[1:])
