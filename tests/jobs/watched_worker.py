"""One of some processes that sum arrays, until something befalls one of them.

python -m tests.jobs.watched_worker RANK RANKS COORDINATOR FAULT VICTIM
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple


TIMEOUT = 4.0
STEPS, AT = 30, 10
MOST = 1_000  # steps in which a preempted job has to reach the step at which all save
BEFALLEN = "befallen at "


def stop(seconds):
    """Stops this process, which goes on after some seconds."""
    again = f"sleep {seconds}; kill -CONT {os.getpid()}"
    quiet = subprocess.DEVNULL  # The test reads what this process prints to its end.
    subprocess.Popen(
        ["sh", "-c", again], start_new_session=True, stdout=quiet, stderr=quiet
    )
    os.kill(os.getpid(), signal.SIGSTOP)


def kill(number):
    """Sends this process a signal, and gives it the time to arrive."""
    os.kill(os.getpid(), number)
    time.sleep(1)


def fail(error):
    """Raises an error."""
    raise error


def fork():
    """Forks a child, which ends in the block of its parent."""
    if os.fork() == 0:
        os._exit(0)  # Python's way out would end JAX's client, which waits for ever.
    os.wait()


class Way(NamedTuple):
    """A way in which a process ends in its block.

    Attributes:
        does: What the process does.
        says: What the sentence says of it with which all end.
        status: That of the process; 1 where the library ends it.
        others: That of the others; None where the library ends them, or JAX aborts them.
        silent: Whether it is found by silence, and not at once.
    """

    does: Callable[[], object]
    says: str
    status: int = 1
    others: int | None = None
    silent: bool = False


def nothing():
    """Does nothing: it is the block that the process leaves in another way."""


ENDS = {
    "sys.exit(0)": Way(lambda: sys.exit(0), "called sys.exit(0) inside its block"),
    "os._exit(0)": Way(lambda: os._exit(0), "ended with status 0", status=0),
    "raise": Way(lambda: fail(ValueError("a bad batch")), "failed: ValueError: a bad"),
    "raise, caught outside": Way(lambda: fail(OSError("no disk")), "failed: OSError: no"),
    "SIGKILL": Way(lambda: kill(signal.SIGKILL), "was killed (SIGKILL)", -signal.SIGKILL),
    "SIGTERM, no notifier": Way(
        lambda: kill(signal.SIGTERM), "was ended by SIGTERM", -signal.SIGTERM
    ),
    "SIGKILL, the others abort": Way(
        lambda: kill(signal.SIGKILL),
        "was killed (SIGKILL)",
        -signal.SIGKILL,
        others=-signal.SIGABRT,
    ),
    "abort": Way(os.abort, "was aborted (SIGABRT)", -signal.SIGABRT),
    "stop": Way(
        lambda: stop(3 * TIMEOUT), "has stood still for 4 s", -signal.SIGKILL, silent=True
    ),
    # It has the number of the process that was watched, and nothing else of it.
    "exec": Way(
        lambda: os.execv(
            sys.executable, [sys.executable, "-c", "import time; time.sleep(1_000)"]
        ),
        "ended without a word",
        -signal.SIGKILL,
    ),
    "the script ends": Way(nothing, "ended its script inside its block"),
}
# What a process does that has left its block, while the others are still in theirs.
LEAVES = {
    "break": nothing,
    "return": nothing,
    "break, and os._exit(0)": lambda: os._exit(0),
}
GOES_ON = {
    "pause": lambda: stop(TIMEOUT / 4),
    "fork": fork,
    "SIGTERM, and all save": lambda: kill(signal.SIGTERM),
    "one works on behind its block": nothing,
}


def main(rank, ranks, address, fault, victim):
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", fault != "SIGTERM, no notifier")
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
    is_victim = rank == victim
    train(lambda: add(x), fault, is_victim)
    if is_victim and fault in LEAVES:
        LEAVES[fault]()
    if is_victim and fault == "one works on behind its block":
        time.sleep(1.5 * TIMEOUT)
    jax.distributed.shutdown()


def train(step, fault, is_victim):
    """Takes steps in a block, and leaves it, or does what the fault is."""
    import sparsejax

    block = sparsejax.advise.watch_job(timeout=TIMEOUT)
    if fault == "the script ends":
        block.__enter__()
        take(step, fault, is_victim)
        sys.exit(0)
    caught = (OSError,) if fault == "raise, caught outside" else ()
    with contextlib.suppress(*caught), block:
        if fault == "return" and is_victim:
            return take(step, fault, is_victim)
        take(step, fault, is_victim)


def take(step, fault, is_victim):
    """Takes steps, and at one of them does to the victim what befalls it."""
    saves = fault == "SIGTERM, and all save"
    for number in range(MOST if saves else STEPS):
        if number == AT and is_victim:
            print(f"{BEFALLEN}{time.time()}", flush=True)
            if fault in LEAVES or fault == "the script ends":
                break
            (GOES_ON[fault] if fault in GOES_ON else ENDS[fault].does)()
        finish(step, fault)
        if saves and is_to_save(number):
            print(f"saved at step {number}", flush=True)
            break
        time.sleep(0.02)


def finish(step, fault):
    """Takes a step to its end."""
    import jax

    try:
        jax.block_until_ready(step())
    except jax.errors.JaxRuntimeError:
        if fault == "SIGKILL, the others abort":
            os.abort()  # as gloo does at times
        raise


def is_to_save(number):
    """Whether all have reached the step at which a preempted job saves."""
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(number)


if __name__ == "__main__":
    main(*sys.argv[1:])
