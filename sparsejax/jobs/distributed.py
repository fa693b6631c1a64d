"""Access to private names of JAX about the job that a process has joined.

No other file uses them. Each name is looked up by the function that needs it, so that a
version of JAX that has moved one breaks only that function.
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
