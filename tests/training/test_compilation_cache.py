"""What one process has compiled, the next finds: JAX's cache of compiled programs."""

import re
import sys

import pytest

from tests.helpers import processes
from tests.helpers.processes import outputs


def main(folder):
    """Trains one step of a table in a process of its own, with its cache in a folder."""
    import jax

    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_compilation_cache_dir", folder)
    # By default what compiles in less than a second is not kept.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

    import jax.numpy as jnp
    import numpy as np
    import optax

    import sparsejax

    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))

    def loss_fn(params, batch):
        return jnp.mean(jnp.square(params["embedding"][batch].sum(-1)))

    tx = optax.chain(sparsejax.zen_sync(), optax.sgd(0.1))
    trainer = sparsejax.data_parallel(loss_fn, tx, jax.make_mesh((4,), ("data",)))
    state = trainer.init({"embedding": jnp.zeros((4000, 64))})
    _, loss = trainer.step(state, np.zeros(512, np.int32))
    jax.block_until_ready(loss)
    print("hits:", events.count("/jax/compilation_cache/cache_hits"))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_second_process_takes_the_step_that_the_first_compiled(tmp_path):
    hits = []
    for _ in range(2):
        worker = processes.start(__name__, tmp_path)
        (output,) = outputs([worker])
        assert worker.returncode == 0, output
        hits.append(int(re.search(r"^hits: (\d+)$", output, re.MULTILINE)[1]))
        kept = list(tmp_path.glob("*-cache"))
        assert [path for path in kept if path.name.startswith("jit_step-")]
    assert hits == [0, len(kept)]


if __name__ == "__main__":
    main(*sys.argv[1:])
