"""The forecast of one group of leaves: bytes, rounds, the time of every scheme, and why.

Times are those of the network: bytes over the bandwidth, and a latency for each message
that waits for another, those of every further round among them. The work of packing is not
in them, but for what an exchange costs whatever its size, `Network.exchange_us`.
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


# The schemes that every group is forecast for: the columns of the table, by their names.
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
        name: The path of the leaf, or of the first and how many more.
        paths: Of the leaves.
        shape: Of the leaf, or of all leaves laid end to end.
        dtype: Of the leaves.
        unit: What an index points at, "element" or "row"; "leaf" where a scheme takes all
            of a leaf at once.
        ids: How many ids of rows a rank lists, where gradients are `RowGrads`, and lists
            of rows are sent; 0 where they are arrays.
        scheme: The scheme that the transformation uses.
        taken: The schemes between which it chooses on this many ranks: itself, but for Zen.
            All of them are compiled; none where it is a dense sum.
        density: The share of one rank's units that are not zero, or that are selected.
        density_after: The share of the sum's units.
        sources: Where the density of each leaf comes from: "given", "measured", "assumed"
            for a table, "dense", where nothing is known to make it sparse, "unknown",
            where that leaf has the shape of a table, or "selected".
        sparsifier: The sparsifier that selects from these leaves, or "".
        values: The code of few bits that it rounds values to, or "".
        coded: Whether values travel in that code; else they are numbers of `dtype`, or of
            the scheme's `wire_dtype`, as sums are.
        every: How many steps there are to an exchange.
        capacity: Entries in the longest message, 0 where it is sent densely.
        rounds: How many collectives with entries follow one another, as in
            `sparsejax.metrics`.
        latencies: How many messages wait for one another, those of all rounds, and those
            that agree on sizes.
        sent_bytes: Bytes that one rank sends in an exchange, to other hosts where there
            are two levels; those of a dense sum, which is over all ranks, to any.
        dense_bytes: Bytes that one rank would send in a dense sum.
        milliseconds: The time of every scheme, that of `scheme` under "chosen"; None where
            a scheme cannot be used.
        roomy: Where owners get and send in several rounds: milliseconds with room in a
            message for as much as is expected, and the entries for which there is room
            on either way; else None.
        columns: Of rows, the bytes and milliseconds of a `ColumnTable` in their place, on
            one level; else None.
        pays_below: The density below which the scheme is sooner done than a dense sum.
        pays_up_to: The bandwidth up to which it is, at this density, in Gbit/s: infinite
            where it costs no more than a dense sum but for bytes, 0 where it saves none.
        reason: Where another scheme is sooner done: why it is not the one.
        verdict: "dense is better here", with what would settle it where a density is
            unknown, or "".
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
        """The fastest scheme, "chosen" where none is faster than that."""
        times = {name: t for name, t in self.milliseconds.items() if t is not None}
        best = min(times, key=lambda name: times[name])
        return CHOSEN if times[CHOSEN] <= times[best] * (1 + 1e-9) else best


@dataclasses.dataclass(frozen=True)
class SchemeTimes:
    """The times of schemes on a network between hosts of `inner` ranks."""

    network: Network
    inner: int

    def across(self, group: Group, load: Load | None = None) -> Load:
        """The load that a rank adds up with other hosts, of a group or of one like it."""
        load = group.load if load is None else load
        return load if self.inner == 1 else load.part(self.inner)

    def dense(self, group: Group) -> Forecast:
        """The forecast of a dense sum of a group with other hosts."""
        return self.across(group).all_reduce(getattr(group.scheme, "wire_dtype", None))

    def seconds(self, forecast: Forecast) -> float:
        """Seconds of a forecast on the network."""
        return forecast.seconds(self.network)

    def pays_up_to(self, forecast: Forecast, dense: Forecast) -> float:
        """The bandwidth at which a forecast takes as long as a dense sum, in Gbit/s."""
        saved = dense.bytes - forecast.bytes
        more = forecast.fixed_seconds(self.network) - dense.fixed_seconds(self.network)
        if saved <= 0 or forecast.dense:
            return 0.0
        return 8e-9 * saved / more if more > 0 else math.inf


def row_of(group: Group, times: SchemeTimes) -> Row:
    """The row of a group."""
    whole, scheme = group.load, group.scheme
    is_dense = isinstance(scheme, schemes.AllReduce)
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
        # Not split in levels: it is one sum over all ranks, those of a host among them.
        own = other = whole.all_reduce(wire_dtype).bytes
    dense_wins = times.seconds(dense) <= times.seconds(forecast) or forecast.dense
    before, after = (whole.counts[k] / max(whole.units, 1) for k in (0, -1))
    if isinstance(scheme, LossyScheme):
        known = getattr(scheme, "densities", None)
        before = after = getattr(scheme, "density", 1.0)
        before, after = (before, after) if known is None else known(whole)
    # What these send does not depend on how sparse a gradient is.
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
    """The verdict on a group whose dense sum is as fast, or faster."""
    if "unknown" in group.sources:
        return "dense is better, unless few rows are read: see below"
    return "dense is better here"


def forecast_of(group: Group, scheme: Scheme, load: Load) -> Forecast:
    """Forecasts a scheme for a group: a sum of values where ranks have the same indices."""
    if group.shared and not isinstance(scheme, LossyScheme):
        count = round(load.counts[0])
        counts = (float(count),) * len(load.counts)
        values = dataclasses.replace(load, units=count, counts=counts)
        return values.all_reduce(getattr(scheme, "wire_dtype", None))
    return scheme.forecast(load)


def _pays_below(group: Group, times: SchemeTimes) -> float:
    """The density below which the scheme is sooner done than a dense sum."""
    whole, scheme = group.load, group.scheme
    dense = times.dense(group)

    def pays(density):
        counts = independent(whole.ranks, whole.units, density)
        load = dataclasses.replace(whole, counts=counts)
        if group.ids:  # lists that are as long, or as long as these rows need
            load = dataclasses.replace(load, room=max(group.ids, math.ceil(counts[0])))
        forecast = forecast_of(group, scheme, times.across(group, load))
        return not forecast.dense and times.seconds(forecast) < times.seconds(dense)

    # Message sizes come in steps, so it may pay, not pay, and pay again above the limit.
    limit = 0.0
    for density in np.geomspace(1e-6, 1, 121):
        if not pays(float(density)):
            break
        limit = float(density)
    return limit


def _columns(group, times):
    """The bytes and the time as a `ColumnTable`; see `Row`."""
    told = columns.forecast(group) if times.inner == 1 else None
    return told and (told.bytes, 1e3 * times.seconds(told))


def _roomy(scheme, load, forecast, times):
    """The time with owners and room for what is expected; see `Row`."""
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
    """The scheme between hosts, where there are two levels."""
    return scheme.across if isinstance(scheme, schemes.TwoLevel) else scheme


def _named(scheme: Scheme) -> str:
    """The scheme as a user writes it."""
    if isinstance(scheme, schemes.TwoLevel):
        return f"TwoLevel({_named(scheme.across)})"
    return type(scheme).__name__


def _taken(scheme: Scheme, load: Load, group: Group) -> tuple[str, ...]:
    """The schemes that are compiled for an exchange."""
    across, ranks = _across(scheme), load.ranks
    if ranks == 1:
        return ()
    if group.ids and isinstance(across, schemes.Zen):
        return (_named(across.for_rows(ranks, load.room or 0, load.units)),)
    if isinstance(across, schemes.Zen):
        return tuple(kind.__name__ for kind in across.candidates(ranks))
    return (_named(across),)


def _reason(row: Row, group: Group) -> str:
    """Why the scheme is not the fastest, if it is not."""
    if row.fastest == CHOSEN:
        return ""
    scheme, least = _across(group.scheme), row.milliseconds[row.fastest]
    sooner = f"{row.fastest} would take {least:.3g} ms"
    if isinstance(scheme, schemes.AllReduce):
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
