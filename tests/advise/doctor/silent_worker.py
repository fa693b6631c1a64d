"""Process 1 of a job of two, which joins it and then says nothing.

python -m tests.advise.doctor.silent_worker COORDINATOR
"""

import sys
import time

import jax

import sparsejax


def main(coordinator):
    jax.config.update("jax_platforms", "cpu")
    sparsejax.advise.check_coordinator(coordinator, 2, 1, one_host=True)
    jax.distributed.initialize(coordinator, 2, 1)
    time.sleep(300)


if __name__ == "__main__":
    main(sys.argv[1])
