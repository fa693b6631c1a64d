"""The check of the `network` argument of functions that forecast times."""

from typing import Any

from sparsejax.errors import ArgumentError
from sparsejax.schemes.forecast import Network


def check_network(network: Any) -> None:
    """Raises unless the argument is a `Network`."""
    if not isinstance(network, Network):
        raise ArgumentError(
            f"network must be a sparsejax.Network(gbit_per_s, latency_us), got {network!r}."
        )
