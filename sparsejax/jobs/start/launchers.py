"""Finds the job that Slurm or Open MPI 4 has started, by JAX's own detection.

`jax.distributed.initialize()` without arguments takes the coordinator and the numbers from
the environment variables of the launcher. This module calls the same code of JAX, through
`jobs.distributed`. If another version of JAX has moved it, no job is found here, and only
the checks before `initialize` are left out.
"""

import os
from typing import NamedTuple

from sparsejax.jobs import distributed


# Launchers for which JAX needs environment variables alone; for others it asks services.
_BY_VARIABLES = ("slurm", "ompi")


class Launched(NamedTuple):
    """The job of this process, as the launcher describes it.

    Attributes:
        coordinator: The coordinator's address, "name:port".
        processes: The number of processes.
        process: The index of this process.
    """

    coordinator: str
    processes: int
    process: int


def found() -> Launched | None:
    """Returns the job of the launcher that started this process; None if JAX finds none."""
    if os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        return None  # Process 0 listens at another address than that of the coordinator.
    try:
        # JAX chooses the first that is present, too.
        kinds = distributed.launchers()
        there = (kind for kind in kinds if not kind.opt_in_only_method)
        kind = next((kind for kind in there if kind.is_env_present()), None)
        if kind is None or kind.name not in _BY_VARIABLES:
            return None
        address = os.environ.get("JAX_COORDINATOR_ADDRESS")
        if not address:
            port = os.environ.get("JAX_COORDINATOR_PORT")
            address = kind.get_coordinator_address(
                timeout_secs=None, override_coordinator_port=port
            )
        return Launched(address, kind.get_process_count(), kind.get_process_id())
    except Exception:  # raised by JAX, which raises it again when it joins the job
        return None
