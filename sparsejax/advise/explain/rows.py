"""The forecast of one group of leaves: bytes, rounds, the time of every scheme, reasons.

Times are those of the network: bytes divided by the bandwidth, and a latency for each
message that waits for another one, in all rounds. The work on the device is left out, but
for the constant cost of a sparse exchange, `Network.exchange_us`.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from sparsejax import schemes
from sparsejax.advise.explain import columns
from sparsejax.advise.explain.reading import Group
from sparsejax.advise.planner import tightened
from sparsejax.errors import ArgumentError
from sparsejax.schemes.base import MOST_UNITS, LossyScheme, Scheme
from sparsejax.schemes.forecast import Forecast, Load, Network, independent
from sparsejax.transforms.buckets import SPARSE_FROM


# The schemes that are forecast for every group: the columns of the table of times.
COMPARED: tuple[Any, ...] = (
    schemes.AllReduce,
    schemes.AGSparse,
    schemes.BalancedParallelism,
    schemes.HierarchicalCentralization,
    schemes.SparCML,
    schemes.OmniReduce,
    schemes.SparsePS,
)
CHOSEN = "chosen"


@dataclasses.dataclass(frozen=True)
class Row:
    """The forecast for leaves that are exchanged together, in one exchange.

    Attributes:
        name: The path of the leaf, or of the first leaf with the number of the others.
        paths: The paths of the leaves.
        shape: The shape of the leaf, or of all leaves concatenated.
        dtype: The dtype of the leaves.
        unit: What an index refers to, "element" or "row"; "leaf" if a scheme takes a whole
            leaf.
        ids: The number of ids of rows that a rank lists, if gradients are `RowGrads` and
            lists of rows are sent; 0 if they are arrays.
        scheme: The scheme that the transformation uses.
        taken: The schemes from which it chooses on this number of ranks: itself, except for
            Zen. All of them are compiled; () for a dense sum.
        density: The share of one rank's units that are non-zero, or selected.
        density_after: The share of the sum's units.
        sources: The source of the density of each leaf: "given", "measured", "assumed" for
            a table, "uniform" for ids of rows, "selected" by a sparsifier, "moved" in a
            round of local steps, "dense" if nothing is known to make the leaf sparse, or
            "unknown" if it is dense and has the shape of a table.
        sparsifier: The sparsifier that selects from these leaves, or "".
        values: The value code to which it rounds values, or "".
        coded: Whether values are sent in that code; else they are sent as `dtype`, or as
            the scheme's `wire_dtype`, as sums are.
        every: The number of steps for each exchange.
        capacity: The number of entries in the longest message; 0 for a dense sum.
        rounds: The number of consecutive collectives with entries, as in
            `sparsejax.metrics`.
        latencies: The number of messages that wait for one another, in all rounds, with
            those that agree on sizes.
        sent_bytes: The bytes that one rank sends in an exchange; for two levels, those to
            other hosts. A dense sum is over all ranks, and its bytes are those to any rank.
        dense_bytes: The bytes that one rank would send in a dense sum.
        milliseconds: The time of every scheme by name, that of `scheme` as "chosen"; None
            if a scheme cannot be used.
        roomy: If owners receive or send in several rounds: the milliseconds with capacities
            for the expected entries, and these capacities of push and pull; else None.
        columns: For rows on one level, the bytes and milliseconds of a `ColumnTable` in
            their place; else None.
        pays_below: The density below which the scheme is faster than a dense sum.
        pays_up_to: The bandwidth in Gbit/s up to which it is faster, at this density:
            infinite if its constant costs are at most those of a dense sum, 0 if it saves
            no bytes.
        reason: If another scheme is faster, the reason why that one is not used; else "".
        verdict: "dense is better here", or a condition for it if a density is unknown, or
            "".
    """

    name: str
    paths: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    unit: str
    ids: int
    scheme: str
    taken: tuple[str, ...]
    density: float
    density_after: float
    sources: tuple[str, ...]
    sparsifier: str
    values: str
    coded: bool
    every: int
    capacity: int
    rounds: int
    latencies: int
    sent_bytes: float
    dense_bytes: float
    milliseconds: dict[str, float | None]
    roomy: tuple[float, int, int] | None
    columns: tuple[float, float] | None
    pays_below: float
    pays_up_to: float
    reason: str
    verdict: str

    @property
    def fastest(self) -> str:
        """The fastest scheme; "chosen" if none is faster than the one in use."""
        times = {name: t for name, t in self.milliseconds.items() if t is not None}
        best = min(times, key=lambda name: times[name])
        return CHOSEN if times[CHOSEN] <= times[best] * (1 + 1e-9) else best


@dataclasses.dataclass(frozen=True)
class SchemeTimes:
    """Computes times of schemes on a network between hosts of `inner` ranks."""

    network: Network
    inner: int

    def across(self, group: Group, load: Load | None = None) -> Load:
        """Returns the part of a load that one rank sums with other hosts."""
        load = group.load if load is None else load
        return load if self.inner == 1 else load.part(self.inner)

    def dense(self, group: Group) -> Forecast:
        """Returns the forecast of a dense sum of a group with other hosts."""
        return self.across(group).all_reduce(getattr(group.scheme, "wire_dtype", None))

    def seconds(self, forecast: Forecast) -> float:
        """Returns the seconds of a forecast on the network."""
        return forecast.seconds(self.network)

    def pays_up_to(self, forecast: Forecast, dense: Forecast) -> float:
        """Returns the bandwidth in Gbit/s at which it takes as long as a dense sum."""
        saved = dense.bytes - forecast.bytes
        more = forecast.fixed_seconds(self.network) - dense.fixed_seconds(self.network)
        if saved <= 0 or forecast.dense:
            return 0.0
        return 8e-9 * saved / more if more > 0 else math.inf


def row_of(group: Group, times: SchemeTimes) -> Row:
    """Makes the row of a group."""
    whole, scheme = group.load, group.scheme
    is_dense = scheme.is_dense
    if whole.units > MOST_UNITS and not is_dense:
        raise ArgumentError(
            f"leaf {group.name!r} has {whole.units:,} units, more than can be numbered: "
            "use rows as units, or the rule 'dense', or shard it over a second mesh axis."
        )
    load = times.across(group)
    wire_dtype = getattr(scheme, "wire_dtype", None)
    dense = times.dense(group)
    forecast = forecast_of(group, scheme, load)
    seconds: dict[str, float | None] = {CHOSEN: times.seconds(forecast)}
    for kind in COMPARED:
        name = kind.__name__
        if kind is schemes.AllReduce:
            seconds[name] = times.seconds(dense)
        elif not whole.units or whole.units > MOST_UNITS:
            seconds[name] = None
        else:
            like = kind(wire_dtype=wire_dtype)
            seconds[name] = times.seconds(forecast_of(group, like, load))
    own, other = forecast.bytes, dense.bytes
    if is_dense:
        # A dense sum has one level, over all ranks, also those of the same host.
        own, other = scheme.forecast(whole).bytes, whole.all_reduce(wire_dtype).bytes
    dense_wins = times.seconds(dense) <= times.seconds(forecast) or forecast.dense
    before, after = (whole.counts[k] / max(whole.units, 1) for k in (0, -1))
    if isinstance(scheme, LossyScheme):
        known = getattr(scheme, "densities", None)
        before = after = getattr(scheme, "density", 1.0)
        before, after = (before, after) if known is None else known(whole)
    # The bytes of these do not depend on the density of a gradient.
    is_fixed = is_dense or group.shared or isinstance(scheme, LossyScheme)
    row = Row(
        name=group.name,
        paths=group.paths,
        shape=group.shape,
        dtype=group.dtype,
        unit=group.unit,
        ids=group.ids,
        scheme=_named(scheme),
        taken=() if is_dense or group.shared else _taken(scheme, load, group),
        density=before,
        density_after=after,
        sources=group.sources,
        sparsifier=type(group.sparsifier).__name__ if group.sparsifier else "",
        values=group.values or "",
        coded=forecast.coded,
        every=group.every,
        capacity=forecast.capacity,
        rounds=forecast.rounds if load.ranks > 1 else 0,
        latencies=forecast.messages,
        sent_bytes=own,
        dense_bytes=other,
        milliseconds={k: None if t is None else 1e3 * t for k, t in seconds.items()},
        roomy=None if group.ids else _roomy(scheme, load, forecast, times),
        columns=_columns(group, times),
        pays_below=0.0 if is_fixed else _pays_below(group, times),
        pays_up_to=times.pays_up_to(forecast, dense),
        reason="",
        verdict=_verdict(group) if dense_wins and not is_fixed else "",
    )
    return dataclasses.replace(row, reason=_reason(row, group))


def _verdict(group):
    """Returns the verdict on a group whose dense sum is as fast, or faster."""
    if "unknown" in group.sources:
        return "dense is better, unless few rows are read: see below"
    return "dense is better here"


def forecast_of(group: Group, scheme: Scheme, load: Load) -> Forecast:
    """Forecasts a scheme for a group; if all ranks have equal indices, a sum of values."""
    if group.shared and not isinstance(scheme, LossyScheme):
        count = round(load.counts[0])
        counts = (float(count),) * len(load.counts)
        values = dataclasses.replace(load, units=count, counts=counts)
        return values.all_reduce(getattr(scheme, "wire_dtype", None))
    return scheme.forecast(load)


def _pays_below(group: Group, times: SchemeTimes) -> float:
    """Returns the density below which the scheme is faster than a dense sum."""
    whole, scheme = group.load, group.scheme
    dense = times.dense(group)

    def pays(density):
        counts = independent(whole.ranks, whole.units, density)
        load = dataclasses.replace(whole, counts=counts)
        if group.ids:  # the given capacity of the lists, or a larger one for these rows
            load = dataclasses.replace(load, room=max(group.ids, math.ceil(counts[0])))
        forecast = forecast_of(group, scheme, times.across(group, load))
        return not forecast.dense and times.seconds(forecast) < times.seconds(dense)

    # Message sizes are discrete, so it may pay again above the first density that does not.
    limit = 0.0
    for density in np.geomspace(1e-6, 1, 121):
        if not pays(float(density)):
            break
        limit = float(density)
    return limit


def _columns(group, times):
    """Returns `Row.columns`."""
    found = columns.forecast(group) if times.inner == 1 else None
    return found and (found.bytes, 1e3 * times.seconds(found))


def _roomy(scheme, load, forecast, times):
    """Returns `Row.roomy`."""
    across = _across(scheme)
    if isinstance(across, schemes.Zen):
        if across.candidates(load.ranks) != (schemes.BalancedParallelism,):
            return None
        across = schemes.BalancedParallelism(
            ownership=across.ownership, wire_dtype=across.wire_dtype
        )
    if not isinstance(across, schemes.BalancedParallelism) or forecast.rounds <= 2:
        return None
    roomy: Any = tightened(across, load, 1.0)
    seconds = times.seconds(roomy.forecast(load))
    return 1e3 * seconds, roomy.push_capacity, roomy.pull_capacity


def _across(scheme: Scheme) -> Scheme:
    """Returns the scheme between hosts, if there are two levels; else the scheme."""
    return scheme.across if isinstance(scheme, schemes.TwoLevel) else scheme


def _named(scheme: Scheme) -> str:
    """Returns the name of the scheme, as a user writes it."""
    if isinstance(scheme, schemes.TwoLevel):
        return f"TwoLevel({_named(scheme.across)})"
    return type(scheme).__name__


def _taken(scheme: Scheme, load: Load, group: Group) -> tuple[str, ...]:
    """Returns the names of the schemes that are compiled for an exchange."""
    across, ranks = _across(scheme), load.ranks
    if ranks == 1:
        return ()
    if group.ids and isinstance(across, schemes.Zen):
        return (_named(across.for_rows(ranks, load.room or 0, load.units)),)
    if isinstance(across, schemes.Zen):
        return tuple(kind.__name__ for kind in across.candidates(ranks))
    return (_named(across),)


def _reason(row: Row, group: Group) -> str:
    """Returns why the scheme is not the fastest one; "" if it is."""
    if row.fastest == CHOSEN:
        return ""
    scheme, least = _across(group.scheme), row.milliseconds[row.fastest]
    sooner = f"{row.fastest} would take {least:.3g} ms"
    if scheme.is_dense:
        if group.load.size < SPARSE_FROM or len(group.paths) > 1:
            small = f"leaves below {SPARSE_FROM:,} numbers join one dense sum"
            return f'{sooner}; {small}, unless a rule says "sparse"'
        return f"{sooner}; the transformation, or a rule, names the dense sum"
    if isinstance(scheme, schemes.Zen) and row.fastest != schemes.AllReduce.__name__:
        return (
            f"{sooner} of the network; Zen goes by the number of ranks, since what a "
            "scheme computes is not in these times"
        )
    if isinstance(scheme, schemes.Zen):
        return f"{sooner}; Zen sends entries where they are fewer bytes"
    return f"{sooner}; the transformation names {_named(scheme)}"
