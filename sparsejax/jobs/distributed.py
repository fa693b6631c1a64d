"""What JAX knows of the job that a process joins, and has no public name for.

This file alone reaches for it. Each name is looked up where it is asked for, so that a
version of JAX that has moved one fails there alone.
"""

from typing import Any

from jax._src import distributed


def state() -> Any:
    """Returns this process's place in its job, and the coordination service's client."""
    return distributed.global_state


def launchers() -> Any:
    """Returns the kinds of launchers that JAX knows, in the order of its choice."""
    module: Any = distributed  # It imports `clusters`, and does not export it.
    return module.clusters.ClusterEnv._cluster_types
