"""A process that joins a job as the number that it is given, which another may have, too.

    python -m tests.advise.doctor.numbered_worker COORDINATOR PROCESSES PROCESS

Prints why the job is refused, or that it is taken.
"""

import sys

import jax


def main(address, processes, process):
    jax.config.update("jax_platforms", "cpu")
    import sparsejax
    from sparsejax.errors import JobError

    place = address, int(processes), int(process)
    try:
        sparsejax.advise.check_coordinator(*place, one_host=True)
        jax.distributed.initialize(*place, initialization_timeout=60)
        sparsejax.check_job()
    except JobError as error:
        print(f"refused: {error}", flush=True)
    else:
        print("taken", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
