"""One of three processes that sum arrays while a fault befalls one of them.

python -m tests.wire.watched_worker RANK RANKS COORDINATOR FAULT
"""

import os
import signal
import subprocess
import sys
import time


# What the sentence says with which all end; nothing where they are to go on.
FAULTS = {
    "none": "",
    "pause": "",
    "kill": "was killed (SIGKILL)",
    "kill 0": "was killed (SIGKILL)",
    "kill, and abort": "was killed (SIGKILL)",
    "abort": "was aborted (SIGABRT)",
    "stop": "has stood still for 4 s",
    "raise": "failed: ValueError: a bad batch",
}
TIMEOUT = 4.0
STEPS, AT = 30, 10


def befall(fault):
    """Does to this process what the fault is."""
    if "kill" in fault:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "abort":
        os.abort()
    if fault in ("pause", "stop"):
        seconds = TIMEOUT / 4 if fault == "pause" else 3 * TIMEOUT
        again = f"sleep {seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", again], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raise":
        raise ValueError("a bad batch")


def main(rank, ranks, address, fault):
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    import sparsejax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(ranks), int(rank))
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    add = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        )
    )
    x = jax.make_array_from_process_local_data(
        jax.NamedSharding(mesh, P("data")), jnp.ones((1, 1000))
    )
    lost = 0 if fault == "kill 0" else 1
    with sparsejax.advise.watch_job(timeout=TIMEOUT):
        for step in range(STEPS):
            if step == AT and int(rank) == lost:
                befall(fault)
            try:
                add(x).block_until_ready()
            except jax.errors.JaxRuntimeError:
                if fault == "kill, and abort":
                    os.abort()  # as gloo does at times
                raise
            time.sleep(0.02)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
