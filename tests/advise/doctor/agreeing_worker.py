"""A process of a job that is checked: prints why the job is refused, or that it is taken.

python -m tests.advise.doctor.agreeing_worker COORDINATOR RANK RANKS DEVICES
"""

import sys

import jax


def main(coordinator, rank, ranks, devices):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.distributed.initialize(
        coordinator, int(ranks), int(rank), initialization_timeout=60
    )
    import sparsejax
    from sparsejax.errors import JobError

    try:
        sparsejax.check_job(timeout=60)
    except JobError as error:
        print(f"refused: {error}", flush=True)
    else:
        print("taken", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
