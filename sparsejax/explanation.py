"""Says, without any device, what a synchronization would do and how long it would take.

    print(sparsejax.explain(tx, params, ranks=16, gbit_per_s=25, latency_us=20))

For each leaf: its scheme and unit, the bytes that one rank would send beside those of a
dense sum, the time of every scheme, and the density below which sending entries pays at
all. Times are those of the network (`forecast`): bytes over the bandwidth, and a latency
for each message that waits for another. The work of packing is not in them.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax import schemes
from sparsejax.errors import ArgumentError, RuleError
from sparsejax.forecast import Forecast, Load, independent
from sparsejax.leaves import Group
from sparsejax.planner import LeafProfile, load_of
from sparsejax.schemes.base import Scheme
from sparsejax.synchronizer import Synchronizer, observed


DENSITY = 0.01  # where none is given

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

Density = float | Mapping[str, float] | Sequence[Mapping[str, LeafProfile]]


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
        milliseconds: The time of every scheme, the leaf's own under "chosen".
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
    milliseconds: dict[str, float]
    pays_below: float
    verdict: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found; `str` makes a table of it.

    Attributes:
        ranks: For how many ranks.
        gbit_per_s: The bandwidth that was reckoned with.
        latency_us: The latency.
        assumed: How density was known.
        leaves: One entry a leaf, in the order of the tree.
    """

    ranks: int
    gbit_per_s: float
    latency_us: float
    assumed: str
    leaves: tuple[LeafForecast, ...]

    def to_json(self) -> str:
        """Everything, as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __str__(self) -> str:
        names = list(EVERY)
        head = ["leaf", "unit", "scheme", "density", "after", "capacity", "sent", "dense"]
        rows = [[*head, "chosen", *names, "pays below", ""]]
        for leaf in self.leaves:
            times = [leaf.milliseconds["chosen"], *(leaf.milliseconds[n] for n in names)]
            rows.append(
                [
                    f"{leaf.path} {list(leaf.shape)}",
                    leaf.unit,
                    leaf.scheme,
                    f"{leaf.density:.2%}",
                    f"{leaf.density_after:.2%}",
                    f"{leaf.capacity:,}" if leaf.capacity else "-",
                    _size(leaf.sent_bytes),
                    _size(leaf.dense_bytes),
                    *(f"{t:.3g}" for t in times),
                    f"{leaf.pays_below:.2%}" if leaf.pays_below else "never",
                    leaf.verdict,
                ]
            )
        sent = sum(leaf.sent_bytes for leaf in self.leaves)
        dense = sum(leaf.dense_bytes for leaf in self.leaves)
        chosen = sum(leaf.milliseconds["chosen"] for leaf in self.leaves)
        densely = sum(leaf.milliseconds["all-reduce"] for leaf in self.leaves)
        lines = [
            f"{self.ranks} ranks, {self.gbit_per_s:g} Gbit/s, {self.latency_us:g} us; "
            f"{self.assumed}",
            "Times in ms, of the network alone; what one rank sends, leaf by leaf.",
            "",
            *_table(rows),
            "",
            f"In all {_size(sent)} and {chosen:.3g} ms; densely {_size(dense)} and "
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
    hosts, inner = ranks if isinstance(ranks, tuple) else (ranks, 1)
    for name, value, least in (("ranks", hosts, 1), ("ranks of a host", inner, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ArgumentError(f"{name} must be a positive int, got {value!r}.")
    if not gbit_per_s > 0 or latency_us < 0:
        raise ArgumentError(
            "gbit_per_s must be positive and latency_us not negative, got "
            f"gbit_per_s={gbit_per_s!r}, latency_us={latency_us!r}."
        )
    found = observed(tx, params)
    if not found:
        raise ArgumentError(
            "there is no sparsejax synchronization in this transformation: put "
            "sparsejax.zen_sync() first in its chain."
        )
    known = _Densities(density, hosts * inner)
    leaves = []
    for synchronizer, groups, arrays in found:
        known.check([path for group in groups for path in group.paths])
        if synchronizer.plan is not None:
            synchronizer.plan.check_ranks(hosts)
        rows = {}
        for group in groups:
            for i, path, units in zip(group.leaves, group.paths, group.units, strict=True):
                load = known.load(path, units, group.shape, arrays[i].dtype)
                load = load.part(inner) if inner > 1 else load
                rows[i] = _leaf(
                    path, arrays[i], group, synchronizer, load, gbit_per_s, latency_us
                )
        leaves += [rows[i] for i in sorted(rows)]
    return Explanation(hosts, gbit_per_s, latency_us, known.assumed, tuple(leaves))


def _leaf(path, array, group: Group, synchronizer: Synchronizer, load: Load, gbit, latency):
    if load.size == 0:
        group = dataclasses.replace(group, scheme=schemes.AllReduce())
    forecast = group.scheme.forecast(load)
    dense = load.all_reduce(synchronizer.wire_dtype)
    seconds = {"chosen": forecast.seconds(gbit, latency)}
    seconds |= {
        name: kind(wire_dtype=synchronizer.wire_dtype).forecast(load).seconds(gbit, latency)
        for name, kind in EVERY.items()
    }
    is_dense = isinstance(group.scheme, schemes.AllReduce)
    better = seconds["all-reduce"] <= seconds["chosen"] or forecast.dense
    units = max(load.units, 1)
    return LeafForecast(
        path,
        tuple(array.shape),
        str(jnp.dtype(array.dtype)),
        "row" if group.shape else "element",
        _name(group.scheme),
        load.counts[0] / units,
        load.counts[-1] / units,
        forecast.capacity,
        forecast.bytes,
        dense.bytes,
        {name: 1e3 * time for name, time in seconds.items()},
        0.0 if is_dense else _pays_below(group.scheme, load, gbit, latency),
        "dense is better here" if better and not is_dense else "",
    )


def _pays_below(scheme: Scheme, load: Load, gbit: float, latency: float) -> float:
    """The density below which the scheme is sooner done than a dense sum."""
    dense = load.all_reduce(getattr(scheme, "wire_dtype", None)).seconds(gbit, latency)

    def pays(density):
        at = dataclasses.replace(load, counts=independent(load.ranks, load.units, density))
        forecast: Forecast = scheme.forecast(at)
        return not forecast.dense and forecast.seconds(gbit, latency) < dense

    low, high = 1e-7, 1.0
    if not pays(low):
        return 0.0
    for _ in range(20):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


class _Densities:
    """What is known of how sparse leaves are."""

    def __init__(self, density: Density | None, ranks: int):
        self.ranks = ranks
        self.numbers: Mapping[str, float] = {"": DENSITY}
        self.profiles: Sequence[Mapping[str, LeafProfile]] = ()
        self.assumed = f"density taken to be {DENSITY:.0%}, sets independent"
        if density is None:
            return
        if isinstance(density, (int, float)):
            self.numbers = {"": float(density)}
            self.assumed = f"density given as {density:.3g}, sets independent"
        elif isinstance(density, Mapping):
            self.numbers = {**density, "": DENSITY}
            self.assumed = f"densities given, else {DENSITY:.0%}; sets independent"
        else:
            self.profiles = density
            self.assumed = f"densities measured in {len(density)} steps"
        for pattern, value in self.numbers.items():
            if not 0 <= value <= 1:
                where = f" for {pattern!r}" if pattern else ""
                raise ArgumentError(f"density must lie in [0, 1], got {value!r}{where}.")

    def check(self, paths):
        """Raises where a pattern matches no leaf."""
        for pattern in self.numbers:
            if not any(re.search(pattern, path) for path in paths):
                raise RuleError(
                    f"the density of {pattern!r} matches no leaf. The leaves are: "
                    + ", ".join(repr(path) for path in paths)
                    + "."
                )

    def load(self, path, units, shape, dtype) -> Load:
        """What there is to add up of one leaf."""
        if any(path in seen for seen in self.profiles):
            return load_of(self.profiles, path, units, shape, dtype, self.ranks)
        share = next(v for k, v in self.numbers.items() if re.search(k, path))
        numbers = 1
        for n in shape:
            numbers *= n
        counts = independent(self.ranks, units, share)
        return Load(self.ranks, units, numbers, str(jnp.dtype(dtype)), counts)


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


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    left = {0, 1, 2, len(widths) - 1}
    lines = [
        "  ".join(
            cell.ljust(width) if k in left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def abstract(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, Any]:
    """Parameters of these shapes and dtypes, without values."""
    return {
        path: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        for path, (shape, dtype) in shapes.items()
    }
