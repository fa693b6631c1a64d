"""The job that Slurm or Open MPI 4 has started, as JAX finds it in their variables.

`jax.distributed.initialize()` takes the coordinator and the numbers from there by itself.
`jobs.distributed` reaches for how it finds them. Where another version of JAX has that
elsewhere, nothing is found, and JAX goes on by itself.
"""

import os
from typing import NamedTuple

from sparsejax.jobs import distributed


# Of other kinds it asks services what it does not know.
_BY_VARIABLES = ("slurm", "ompi")


class Launched(NamedTuple):
    """A job, as one of its processes finds it.

    Attributes:
        coordinator: Its address, "name:port".
        processes: How many processes it has.
        process: The number of this one.
    """

    coordinator: str
    processes: int
    process: int


def found() -> Launched | None:
    """The job of the launcher that started this process; None where JAX finds no such."""
    if os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        return None  # Process 0 listens elsewhere than where it is reached.
    try:
        # The first one present is JAX's choice, too.
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
    except Exception:  # of JAX, which says the same where it joins the job
        return None
