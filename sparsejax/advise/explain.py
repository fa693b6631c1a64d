"""Says, without any device, what a synchronization would do and how long it would take.

    network = sparsejax.Network(gbit_per_s=25, latency_us=20)
    print(sparsejax.explain(tx, params, ranks=16, network=network))

For each leaf: its scheme and unit, the bytes that one rank would send beside those of a
dense sum, the time of every scheme, and the density below which sending entries pays at
all. Times are those of the network (`forecast`): bytes over the bandwidth, and a latency
for each message that waits for another. The work of packing is not in them.
"""

import dataclasses
import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from sparsejax import schemes
from sparsejax.advise import codec
from sparsejax.advise.network import network_of
from sparsejax.advise.profile import Density, densities
from sparsejax.advise.table import size, table
from sparsejax.errors import ArgumentError
from sparsejax.schemes.base import MOST_UNITS, Scheme
from sparsejax.schemes.forecast import Forecast, Load, Network, independent
from sparsejax.transforms.buckets import Bucket
from sparsejax.transforms.state.per_rank import observed


# The schemes that every leaf is forecast for, by the names of the table.
COMPARED = {
    "all-reduce": schemes.AllReduce,
    "AGsparse": schemes.AGSparse,
    "SparCML": schemes.SparCML,
    "OmniReduce": schemes.OmniReduce,
    "SparsePS": schemes.SparsePS,
    "balanced": schemes.BalancedParallelism,
    "hierarchical": schemes.HierarchicalCentralization,
}


@dataclasses.dataclass(frozen=True)
class LeafForecast:
    """The forecast for one leaf, as if it were exchanged alone.

    Attributes:
        path: Its path.
        shape: Its shape.
        dtype: Its dtype.
        unit: What an index points at: "element" or "row".
        scheme: The scheme that the optimizer uses for it.
        density: The share of one rank's units that is taken to be non-zero.
        density_after: The share of the sum's units.
        capacity: Entries in the longest message, 0 where it is sent densely.
        sent_bytes: Bytes that one rank would send.
        dense_bytes: Bytes that one rank would send in a dense sum.
        milliseconds: The time of every scheme, that of `scheme` under "chosen"; None where
            a scheme cannot be used.
        pays_below: The density below which the scheme is sooner done than a dense sum.
        verdict: "dense is better here", or "".
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    unit: str
    scheme: str
    density: float
    density_after: float
    capacity: int
    sent_bytes: float
    dense_bytes: float
    milliseconds: dict[str, float | None]
    pays_below: float
    verdict: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The forecasts of `explain` for all leaves; `str` makes a table of them.

    Attributes:
        ranks: For how many ranks; hosts, where there are two levels.
        inner: Ranks of a host; 1 where there is one level.
        gbit_per_s: Bandwidth of a rank's link, in one direction.
        latency_us: Time of an empty message.
        assumed: Where the densities come from, in words.
        leaves: One entry a leaf, in the order of the tree.
    """

    ranks: int
    inner: int
    gbit_per_s: float
    latency_us: float
    assumed: str
    leaves: tuple[LeafForecast, ...]

    def to_json(self) -> str:
        """Everything, as a JSON object."""
        return codec.dumps(self)

    def __str__(self) -> str:
        ranks = f"{self.ranks} ranks"
        if self.inner > 1:
            ranks = f"{self.ranks} hosts of {self.inner} ranks"
        sent = sum(leaf.sent_bytes for leaf in self.leaves)
        dense = sum(leaf.dense_bytes for leaf in self.leaves)
        sent_ms, dense_ms = (
            sum(leaf.milliseconds[name] or 0.0 for leaf in self.leaves)
            for name in ("chosen", "all-reduce")
        )
        lines = [
            f"{ranks}, {self.gbit_per_s:g} Gbit/s, {self.latency_us:g} us; {self.assumed}",
            "",
            "What one rank sends, leaf by leaf; room is entries in the longest message:",
            "",
            *table([_SENT, *map(_sent, self.leaves)], left=(0, 1, 2, 9)),
            "",
            "Milliseconds on the network, the work on the device left out:",
            "",
            *table([["leaf", *_TIMES], *map(_times, self.leaves)], left=(0,)),
            "",
            f"In all {size(sent)} and {sent_ms:.3g} ms; densely {size(dense)} and "
            f"{dense_ms:.3g} ms.",
        ]
        return "\n".join(lines)


_SENT = ["leaf", "unit", "scheme", "density", "after", "room", "sends", "dense"]
_SENT += ["pays below", ""]
_TIMES = ["chosen", *COMPARED]


def _sent(leaf: LeafForecast) -> list[str]:
    """A row of the table of bytes."""
    return [
        f"{leaf.path or 'value'} {list(leaf.shape)}",
        leaf.unit,
        leaf.scheme,
        f"{leaf.density:.2%}",
        f"{leaf.density_after:.2%}",
        f"{leaf.capacity:,}" if leaf.capacity else "-",
        size(leaf.sent_bytes),
        size(leaf.dense_bytes),
        f"{leaf.pays_below:.2%}" if leaf.pays_below else "-",
        leaf.verdict,
    ]


def _times(leaf: LeafForecast) -> list[str]:
    """A row of the table of times."""
    times = [leaf.milliseconds[name] for name in _TIMES]
    return [leaf.path or "value", *("-" if t is None else f"{t:.3g}" for t in times)]


def explain(
    tx: optax.GradientTransformation,
    params: Any,
    *,
    ranks: int | tuple[int, int],
    network: Network | None = None,
    gbit_per_s: float | None = None,
    latency_us: float | None = None,
    density: Density | None = None,
) -> Explanation:
    """Forecasts bytes and times of the synchronizations in an optimizer, without devices.

    Args:
        tx: The optimizer, with a synchronization somewhere in it.
        params: The parameters, or anything with their shapes and dtypes.
        ranks: How many ranks; a pair (hosts, ranks of a host) for two levels.
        network: Bandwidth and latency between the ranks.
        gbit_per_s: Bandwidth of a rank's link in one direction, where `network` is None.
        latency_us: Time of an empty message, where `network` is None.
        density: The share of a rank's units that is non-zero: one number, numbers by
            regular expressions searched in the paths, or results of `sparsejax.profile`,
            one a step. If None, 1%. From numbers alone, sums are those of independent
            sets, which overlap least.

    Returns:
        An `Explanation`, to be printed or read.
    """
    network = network_of(network, gbit_per_s, latency_us)
    hosts, inner = _hosts_and_inner(ranks)
    seen = observed(tx, params) if hasattr(tx, "update") else []
    if not seen:
        raise ArgumentError(
            "there is no sparsejax synchronization in this transformation: put "
            "sparsejax.zen_sync() first in its chain."
        )
    times = _Times(network, inner)
    by_path = densities(density, hosts * inner)
    by_path.check([path for _, buckets, _ in seen for b in buckets for path in b.paths])
    leaves = []
    for exchange, buckets, arrays in seen:
        _check_levels(buckets, isinstance(ranks, tuple))
        exchange.assignment.check_ranks(hosts)
        rows = {}
        for bucket in buckets:
            members = zip(bucket.leaves, bucket.paths, bucket.units, strict=True)
            for i, path, units in members:
                load = by_path.load(path, units, bucket.shape, arrays[i].dtype)
                rows[i] = _leaf(path, arrays[i], bucket, load, times)
        leaves += [rows[i] for i in sorted(rows)]
    return Explanation(
        hosts,
        inner,
        network.gbit_per_s,
        network.latency_us,
        by_path.origin,
        tuple(leaves),
    )


def _hosts_and_inner(ranks) -> tuple[int, int]:
    """The number of hosts and of a host's ranks; hosts of one rank where it is one int."""
    pair = ranks if isinstance(ranks, tuple) else (ranks, 1)
    if len(pair) != 2 or any(
        isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < 1 for n in pair
    ):
        raise ArgumentError(
            "ranks must be a positive int, or a pair (hosts, ranks of a host), got "
            f"{ranks!r}."
        )
    return int(pair[0]), int(pair[1])


@dataclasses.dataclass(frozen=True)
class _Times:
    """The times of schemes on a network between hosts of `inner` ranks."""

    network: Network
    inner: int

    def across(self, load: Load) -> Load:
        """The load that one rank adds up with other hosts."""
        return load.part(self.inner) if self.inner > 1 else load

    def seconds(self, forecast: Forecast) -> float:
        """Seconds of a forecast on the network."""
        return forecast.seconds(self.network)


def _check_levels(buckets, two):
    """Raises unless a pair of ranks and schemes for two levels come together."""
    levels = [isinstance(bucket.scheme, schemes.TwoLevel) for bucket in buckets]
    sparse = [not isinstance(bucket.scheme, schemes.AllReduce) for bucket in buckets]
    if any(levels) and not two:
        raise ArgumentError(
            "the synchronization has two levels, and ranks is one number: pass "
            "ranks=(hosts, ranks of a host)."
        )
    if two and any(sparse) and not any(levels):
        raise ArgumentError(
            "ranks is a pair, and the synchronization has one level: give it two axes, "
            'as in sparsejax.zen_sync(("hosts", "devices")), or pass one number.'
        )


def _leaf(path, array, bucket: Bucket, whole: Load, times: _Times) -> LeafForecast:
    scheme = bucket.scheme if whole.size else schemes.AllReduce()
    is_dense = isinstance(scheme, schemes.AllReduce)
    if whole.units > MOST_UNITS and not is_dense:
        raise ArgumentError(
            f"leaf {path!r} has {whole.units:,} units, more than can be numbered: use rows "
            "as units, or the rule 'dense', or shard it over a second mesh axis."
        )
    load = times.across(whole)
    wire_dtype = getattr(scheme, "wire_dtype", None)
    forecast, dense = scheme.forecast(load), load.all_reduce(wire_dtype)
    seconds: dict[str, float | None] = {"chosen": times.seconds(forecast)}
    for name, kind in COMPARED.items():
        seconds[name] = None
        if kind is schemes.AllReduce:
            seconds[name] = times.seconds(dense)
        elif whole.units and whole.units <= MOST_UNITS:
            seconds[name] = times.seconds(kind(wire_dtype=wire_dtype).forecast(load))
    dense_wins = times.seconds(dense) <= times.seconds(forecast) or forecast.dense
    units = max(whole.units, 1)
    return LeafForecast(
        path=path,
        shape=tuple(array.shape),
        dtype=str(jnp.dtype(array.dtype)),
        unit="row" if bucket.shape else "element",
        scheme=_name(scheme),
        density=whole.counts[0] / units,
        density_after=whole.counts[-1] / units,
        capacity=forecast.capacity,
        sent_bytes=forecast.bytes,
        dense_bytes=dense.bytes,
        milliseconds={k: None if t is None else 1e3 * t for k, t in seconds.items()},
        pays_below=0.0 if is_dense else _pays_below(scheme, whole, times),
        verdict="dense is better here" if dense_wins and not is_dense else "",
    )


def _pays_below(scheme: Scheme, whole: Load, times: _Times) -> float:
    """The density below which the scheme is sooner done than a dense sum."""
    dense = times.across(whole).all_reduce(getattr(scheme, "wire_dtype", None))

    def pays(density):
        counts = independent(whole.ranks, whole.units, density)
        load = times.across(dataclasses.replace(whole, counts=counts))
        forecast = scheme.forecast(load)
        return not forecast.dense and times.seconds(forecast) < times.seconds(dense)

    # Message sizes come in steps, so it may pay, not pay, and pay again above the limit.
    limit = 0.0
    for density in np.geomspace(1e-6, 1, 121):
        if not pays(float(density)):
            break
        limit = float(density)
    return limit


def _name(scheme: Scheme) -> str:
    if isinstance(scheme, schemes.TwoLevel):
        return f"two-level {_name(scheme.across)}"
    if isinstance(scheme, schemes.AllReduce):
        return "dense"
    return type(scheme).__name__
