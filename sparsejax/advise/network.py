"""The network arguments of the functions that forecast times."""

from sparsejax.errors import ArgumentError
from sparsejax.schemes.forecast import Network


def network_of(
    network: Network | None, gbit_per_s: float | None, latency_us: float | None
) -> Network:
    """The network of a call, which passes `network` or its two numbers."""
    if network is None:
        for name, value in (("gbit_per_s", gbit_per_s), ("latency_us", latency_us)):
            if value is None:
                raise ArgumentError(
                    f"{name} is missing: pass network=sparsejax.Network(gbit_per_s, "
                    "latency_us), or gbit_per_s and latency_us."
                )
        return Network(gbit_per_s, latency_us)  # type: ignore[arg-type]
    if gbit_per_s is not None or latency_us is not None:
        raise ArgumentError(
            "network says gbit_per_s and latency_us already: pass network alone, or the "
            "two numbers."
        )
    if not isinstance(network, Network):
        raise ArgumentError(
            f"network must be a sparsejax.Network(gbit_per_s, latency_us), got {network!r}."
        )
    return network
