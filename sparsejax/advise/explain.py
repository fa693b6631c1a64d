"""Says, without any device, what a synchronization would do and how long it would take.

    print(sparsejax.explain(tx, params, ranks=16, gbit_per_s=25, latency_us=20))

For each leaf: its scheme and unit, the bytes that one rank would send beside those of a
dense sum, the time of every scheme, and the density below which sending entries pays at
all. Times are those of the network (`forecast`): bytes over the bandwidth, and a latency
for each message that waits for another. The work of packing is not in them.
"""

import dataclasses
import json
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax import schemes
from sparsejax.advise.densities import Density, densities
from sparsejax.errors import ArgumentError
from sparsejax.schemes.base import MOST_UNITS, Scheme
from sparsejax.schemes.forecast import Forecast, Load, independent
from sparsejax.transforms.buckets import Group
from sparsejax.transforms.exchange import observed


# All that could be chosen, by the names of the table.
EVERY = {
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
    """What is forecast for one leaf, as if it went alone.

    Attributes:
        path: Its path.
        shape: Its shape.
        dtype: Its dtype.
        unit: What an index points at: "element" or "row".
        scheme: How it is added up.
        density: The share of one rank's units that is taken to be non-zero.
        density_after: The share of the sum's.
        capacity: Entries in the longest message, 0 where it goes densely.
        sent_bytes: What one rank would send.
        dense_bytes: What it would send in a dense sum.
        milliseconds: The time of every scheme, the leaf's own under "chosen"; None where a
            scheme cannot be used.
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
    """What `explain` found; `str` makes a table of it.

    Attributes:
        ranks: For how many ranks; hosts, where there are two levels.
        inner: Ranks of a host; 1 where there is one level.
        gbit_per_s: The bandwidth that was reckoned with.
        latency_us: The latency.
        assumed: How density was known.
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
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __str__(self) -> str:
        sent = [["leaf", "unit", "scheme", "density", "after", "room", "sends", "dense"]]
        sent[0] += ["pays below", ""]
        times = [["leaf", "chosen", *EVERY]]
        for leaf in self.leaves:
            sent.append(
                [
                    f"{leaf.path or 'value'} {list(leaf.shape)}",
                    leaf.unit,
                    leaf.scheme,
                    f"{leaf.density:.2%}",
                    f"{leaf.density_after:.2%}",
                    f"{leaf.capacity:,}" if leaf.capacity else "-",
                    _size(leaf.sent_bytes),
                    _size(leaf.dense_bytes),
                    f"{leaf.pays_below:.2%}" if leaf.pays_below else "-",
                    leaf.verdict,
                ]
            )
            own = [leaf.milliseconds[name] for name in ("chosen", *EVERY)]
            shown = ["-" if time is None else f"{time:.3g}" for time in own]
            times.append([leaf.path or "value", *shown])
        bytes_sent = sum(leaf.sent_bytes for leaf in self.leaves)
        dense = sum(leaf.dense_bytes for leaf in self.leaves)
        chosen, densely = (
            sum(leaf.milliseconds[name] or 0.0 for leaf in self.leaves)
            for name in ("chosen", "all-reduce")
        )
        ranks = f"{self.ranks} ranks"
        if self.inner > 1:
            ranks = f"{self.ranks} hosts of {self.inner} ranks"
        lines = [
            f"{ranks}, {self.gbit_per_s:g} Gbit/s, {self.latency_us:g} us; {self.assumed}",
            "",
            "What one rank sends, leaf by leaf; room is entries in the longest message:",
            "",
            *_table(sent, left=(0, 1, 2, 9)),
            "",
            "Milliseconds on the network, the work on the device left out:",
            "",
            *_table(times, left=(0,)),
            "",
            f"In all {_size(bytes_sent)} and {chosen:.3g} ms; densely {_size(dense)} and "
            f"{densely:.3g} ms.",
        ]
        return "\n".join(lines)


def explain(
    tx: optax.GradientTransformation,
    params: Any,
    *,
    ranks: int | tuple[int, int],
    gbit_per_s: float,
    latency_us: float,
    density: Density | None = None,
) -> Explanation:
    """Says what the synchronizations in an optimizer would do. No devices are needed.

    Args:
        tx: The optimizer, with a synchronization somewhere in it.
        params: The parameters, or anything with their shapes and dtypes.
        ranks: How many ranks; a pair (hosts, ranks of a host) for two levels.
        gbit_per_s: What a rank's link carries, in one direction.
        latency_us: How long an empty message takes.
        density: The share of a rank's units that is non-zero: one number, numbers by
            regular expressions searched in the paths, or results of `sparsejax.profile`,
            one a step. If None, 1%. From numbers alone, sums are those of independent
            sets, which overlap least.

    Returns:
        An `Explanation`, to be printed or read.
    """
    pair = ranks if isinstance(ranks, tuple) else (ranks, 1)
    if len(pair) != 2 or any(
        isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < 1 for n in pair
    ):
        raise ArgumentError(
            "ranks must be a positive int, or a pair (hosts, ranks of a host), got "
            f"{ranks!r}."
        )
    if not gbit_per_s > 0 or not latency_us >= 0:
        raise ArgumentError(
            "gbit_per_s must be positive and latency_us not negative, got "
            f"gbit_per_s={gbit_per_s!r}, latency_us={latency_us!r}."
        )
    found = observed(tx, params) if hasattr(tx, "update") else []
    if not found:
        raise ArgumentError(
            "there is no sparsejax synchronization in this transformation: put "
            "sparsejax.zen_sync() first in its chain."
        )
    hosts, inner = (int(n) for n in pair)
    network = _Network(hosts, inner, gbit_per_s, latency_us)
    known = densities(density, hosts * inner)
    known.check([path for _, groups, _ in found for g in groups for path in g.paths])
    leaves = []
    for synchronizer, groups, arrays in found:
        _check_levels(groups, isinstance(ranks, tuple))
        if synchronizer.plan is not None:
            synchronizer.plan.check_ranks(hosts)
        rows = {}
        for group in groups:
            for i, path, units in zip(group.leaves, group.paths, group.units, strict=True):
                load = known.load(path, units, group.shape, arrays[i].dtype)
                rows[i] = _leaf(path, arrays[i], group, load, network)
        leaves += [rows[i] for i in sorted(rows)]
    return Explanation(hosts, inner, gbit_per_s, latency_us, known.told, tuple(leaves))


@dataclasses.dataclass(frozen=True)
class _Network:
    hosts: int
    inner: int
    gbit_per_s: float
    latency_us: float

    def across(self, load: Load) -> Load:
        """What one rank has to add up with other hosts."""
        return load.part(self.inner) if self.inner > 1 else load

    def seconds(self, forecast: Forecast) -> float:
        """How long it takes on this network."""
        return forecast.seconds(self.gbit_per_s, self.latency_us)


def _check_levels(groups, two):
    """Raises unless a pair of ranks and schemes for two levels come together."""
    levels = [isinstance(group.scheme, schemes.TwoLevel) for group in groups]
    sparse = [not isinstance(group.scheme, schemes.AllReduce) for group in groups]
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


def _leaf(path, array, group: Group, whole: Load, network: _Network) -> LeafForecast:
    scheme = group.scheme if whole.size else schemes.AllReduce()
    is_dense = isinstance(scheme, schemes.AllReduce)
    if whole.units > MOST_UNITS and not is_dense:
        raise ArgumentError(
            f"leaf {path!r} has {whole.units:,} units, more than can be numbered: use rows "
            "as units, or the rule 'dense', or shard it over a second mesh axis."
        )
    load = network.across(whole)
    narrow = getattr(scheme, "wire_dtype", None)
    forecast, dense = scheme.forecast(load), load.all_reduce(narrow)
    seconds: dict[str, float | None] = {"chosen": network.seconds(forecast)}
    for name, kind in EVERY.items():
        seconds[name] = None
        if kind is schemes.AllReduce:
            seconds[name] = network.seconds(dense)
        elif whole.units and whole.units <= MOST_UNITS:
            seconds[name] = network.seconds(kind(wire_dtype=narrow).forecast(load))
    better = network.seconds(dense) <= network.seconds(forecast) or forecast.dense
    units = max(whole.units, 1)
    return LeafForecast(
        path,
        tuple(array.shape),
        str(jnp.dtype(array.dtype)),
        "row" if group.shape else "element",
        _name(scheme),
        whole.counts[0] / units,
        whole.counts[-1] / units,
        forecast.capacity,
        forecast.bytes,
        dense.bytes,
        {k: None if t is None else 1e3 * t for k, t in seconds.items()},
        0.0 if is_dense else _pays_below(scheme, whole, network),
        "dense is better here" if better and not is_dense else "",
    )


def _pays_below(scheme: Scheme, whole: Load, network: _Network) -> float:
    """The density below which the scheme is sooner done than a dense sum."""
    dense = network.across(whole).all_reduce(getattr(scheme, "wire_dtype", None))

    def pays(density):
        counts = independent(whole.ranks, whole.units, density)
        forecast = scheme.forecast(
            network.across(dataclasses.replace(whole, counts=counts))
        )
        sooner = network.seconds(forecast) < network.seconds(dense)
        return not forecast.dense and sooner

    # Message sizes come in steps, so it may pay, not pay, and pay again: the first is told.
    low = 0.0
    for density in np.geomspace(1e-6, 1, 121):
        if not pays(float(density)):
            break
        low = float(density)
    return low


def _name(scheme: Scheme) -> str:
    if isinstance(scheme, schemes.TwoLevel):
        return f"two-level {_name(scheme.across)}"
    if isinstance(scheme, schemes.AllReduce):
        return "dense"
    return type(scheme).__name__


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def _table(rows: list[list[str]], left: Sequence[int]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if k in left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(len(line) for line in lines), *lines[1:]]


def abstract(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, Any]:
    """Parameters of these shapes and dtypes, without values."""
    return {
        path: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        for path, (shape, dtype) in shapes.items()
    }
