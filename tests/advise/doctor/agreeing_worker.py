"""A process of a job that is checked: prints why the job is refused, or that it is taken.

    python -m tests.advise.doctor.agreeing_worker COORDINATOR RANK RANKS DEVICES [STEPS]

STEPS is an argument that processes must agree on. With "late" a process joins the job and
says nothing; with "short" it waits for the others for four seconds only.
"""

import os
import sys
import time

import jax


def main(coordinator, rank, ranks, devices, steps="100"):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.distributed.initialize(
        coordinator, int(ranks), int(rank), initialization_timeout=60
    )
    import sparsejax
    from sparsejax.errors import JobError

    if steps == "late":
        time.sleep(600)
    start = time.monotonic()
    try:
        sparsejax.check_job(
            arguments={"steps": steps}, timeout=4 if steps == "short" else 60
        )
    except JobError as error:
        print(f"refused after {time.monotonic() - start:.0f} s: {error}", flush=True)
    else:
        print("taken", flush=True)
    if steps == "short":
        time.sleep(2)  # With process 0 ends who has not printed it yet.
        os._exit(0)  # Saying good-bye would wait for the late one.
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
