"""The sentences of an explanation: assumptions, exchanges to compile, and advice."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding

from sparsejax import schemes, sparsifiers
from sparsejax.advise.explain.densities import TABLE
from sparsejax.advise.explain.reading import Group
from sparsejax.advise.explain.rows import CHOSEN, Row, SchemeTimes, forecast_of
from sparsejax.advise.table import size
from sparsejax.schemes.base import MOST_UNITS, LossyScheme, Scheme
from sparsejax.schemes.forecast import independent
from sparsejax.state import sharded, tree
from sparsejax.transforms.buckets import SPARSE_FROM


_DENSE = schemes.AllReduce.__name__
_WORTH = 0.9  # the share of the dense time below which a scheme is worth the change
_DGC = 0.01
_SYSTEMS = {
    "OkTopk": "sparsejax.ok_topk_sync(...)",
    "SparDL": "sparsejax.spardl_sync(...)",
    "GTopk": "sparsejax.transforms.gtopk_sync(...)",
    "PowerSGD": "sparsejax.transforms.power_sgd_sync(...)",
    "Chunks": "sparsejax.chunked_sync(...)",
}
# benchmarks/results/core-jax0.10.2.jsonl, part "compile".
_MEASURED = (
    "measured with XLA:CPU (JAX 0.10.2, two cores of an AMD EPYC, eight simulated "
    "devices), a train step of forty leaves took 4.2 to 4.7 s with none, 8.6 to 10.1 "
    "with one, 13.0 to 14.7 with two"
)


def assumed(groups: Sequence[Group], rows: Sequence[Row]) -> Iterator[str]:
    """Yields a sentence for each assumption of the rows."""
    pairs = [pair for pair in zip(groups, rows, strict=True) if pair[1].taken]
    tables = _paths([row for _, row in pairs], "assumed")
    if tables:
        yield (
            f"Assumed: a rank touches {TABLE:.0%} of the rows of {_some(tables)}, by name "
            "and shape a table; density= says better, a number or sparsejax.profile."
        )
    uniform = _paths([row for _, row in pairs], "uniform")
    if uniform:
        yield (
            f"Ids of {_some(uniform)} are taken to be drawn uniformly from all rows; ids "
            "that repeat list fewer rows, which density= says."
        )
    dense = _paths([row for group, row in pairs if not _chooses(group.scheme)], "dense")
    if dense:
        yield f"Taken to be dense, since nothing makes it sparse: {_some(dense)}."
    unknown = _paths(rows, "unknown")
    if unknown:
        one = unknown[0]
        yield (
            f"Taken to be dense, though tall as tables are: {_some(unknown)}. If a step "
            f"reads some of the rows, say how many: ids={{{one!r}: n}} (--ids), the ids of "
            "a rank, where gradients come as rows (sparsejax.lazy); else density="
            f"{{{one!r}: share}}, or sparsejax.profile."
        )
    undecided = _undecided(groups, rows)
    if undecided:
        yield (
            "What changes a parameter is sent, taken to be everything of "
            f"{_some(undecided)}: density= says better, the density_before of metrics."
        )
    sources = {source for _, row in pairs for source in row.sources}
    if sources - {"measured", "dense", "unknown", "moved"}:
        yield "Sets of several ranks are taken to be independent, which overlap least."
    for sparsifier in dict.fromkeys(g.sparsifier for g in groups if g.sparsifier):
        name = type(sparsifier).__name__
        if isinstance(sparsifier, sparsifiers.Threshold):
            yield f"{name} selects what is large enough, at most what is said here."
        elif (correction := getattr(sparsifier, "correction", None)) is not None:
            yield (
                f"{name} estimates its threshold: it selects {correction.fewest:.0%} to "
                f"{correction.most:.0%} of what is said here."
            )
        most = getattr(sparsifier.density, "largest", None)
        if isinstance(sparsifier.density, sparsifiers.Warmup):
            yield f"{name} is taken after its warm-up; before, it sends up to {most:.3%}."
        elif most is not None:
            yield f"{name} is taken at the largest density of its schedule, {most:.3%}."
    for steps in sorted({group.dense_steps for group in groups} - {0}):
        yield f"The first {steps} exchanges send everything densely."
    yield from _by_rank(groups)
    sparse = [group for group, row in pairs if row.density < 1 and not group.in_rounds]
    for every in sorted({group.every for group in sparse} - {1}):
        yield (
            f"Of {every} steps added up, 1 - (1 - d)^{every} of the units are taken to be "
            "there, as of steps drawn independently; similar steps have fewer."
        )


def of_shards(params: Any) -> Iterator[str]:
    """Yields what a forecast of parameters that are sharded on a mesh does not count."""
    paths, leaves, _ = tree.flatten(sharded.apart(params).rest, "sparsejax.explain")
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    shards = [
        path
        for path, found in zip(paths, shardings, strict=True)
        if isinstance(found, NamedSharding) and not found.is_fully_replicated
    ]
    if shards:
        yield (
            f"{_some(shards)} are counted whole, as if one rank had them, though a device "
            "has a shard: a step decides by shards, and metrics count those of a device. "
            "Give the shapes of shards as jax.ShapeDtypeStruct."
        )


def _undecided(groups, rows):
    """Returns names of rows whose sparsifier reads parameters, if no density was given."""
    return [
        row.name
        for group, row in zip(groups, rows, strict=True)
        if group.sparsifier is not None
        and group.sparsifier.reads_params
        and not {"given", "measured"} & set(group.sources)
    ]


def _by_rank(groups):
    """Yields sentences about local steps: what is exchanged, and what is kept by rank."""
    moved = [group for group in groups if group.in_rounds]
    for every in sorted({group.every for group in moved}):
        loads = [group.load for group in moved if group.every == every]
        held = size(sum(load.size * jnp.dtype(load.dtype).itemsize for load in loads))
        yield (
            f"Exchanged is what each rank has moved in {every} steps, taken to be dense "
            "unless density= says how much of it is not zero: momentum and decay move what "
            f"has no gradient. By rank, and not sent, are offsets, {held} a rank, and the "
            "state of the inner optimizer."
        )


def _paths(rows, source):
    """Returns the paths of leaves whose density has this source."""
    return [
        path
        for row in rows
        for path, its in zip(row.paths, row.sources, strict=True)
        if its == source
    ]


def compiling(rows: Sequence[Row]) -> str:
    """Returns the number of exchanges to compile, a measured time, and how to save some."""
    exchanges = [row for row in rows if row.taken]
    count, kinds = len(exchanges), sum(len(row.taken) for row in exchanges)
    if not count:
        return "Compiling: no sparse exchange."
    text = f"Compiling: {count} sparse exchange{'s' if count > 1 else ''}"
    if kinds > count:
        text += f" of {kinds} schemes in all"
    text += f"; {_MEASURED}."
    if any(row.sparsifier for row in rows):
        text += " The sparsifier comes on top."
    if kinds > count:
        one = exchanges[0].taken[0]
        text += f" Naming one scheme, sparsejax.sync(schemes.{one}()), compiles that alone."
    elif count > 1:
        text += (
            ' The rule "dense" for what is dense, or a plan (sparsejax.make_plan) that '
            "finds it out, compiles fewer exchanges."
        )
    return text


def advise(groups: Sequence[Group], rows: Sequence[Row], times: SchemeTimes) -> str:
    """Returns a sentence of advice that names the call."""
    if all(row.dense_bytes == 0 for row in rows):
        return "Advice: keep it as it is; there is nothing to send."
    current, dense = (_step(rows, name) for name in (CHOSEN, _DENSE))
    call, in_rounds = _call(rows), all(group.in_rounds for group in groups)
    sync = "sync=" if in_rounds else ""
    unknown = _paths(rows, "unknown")
    if unknown and current >= _WORTH * dense:
        return (
            f"Advice: say first what a step reads of {_some(unknown)}, ids= or density=: "
            f"taken to be dense, a step takes {current:.3g} ms, {dense:.3g} densely, and a "
            "table of which few rows are read takes a small part of that."
        )
    if current < _WORTH * dense:
        gain = f"{current:.3g} ms a step instead of {dense:.3g} densely"
        sparser = _with(groups, rows, times, _sparsified)
        kept = f"the exchange of a round, {call}" if in_rounds else call
        return f"Advice: keep {kept}: {gain}{_but(rows, current, sparser)}."
    undecided = _undecided(groups, rows)
    if undecided:
        return (
            f"Advice: say first what share of {_some(undecided)} changes a parameter, "
            f"density=: taken to be everything, a step takes {current:.3g} ms, {dense:.3g} "
            "densely, and a small share takes a small part of that."
        )
    if any(row.sparsifier and row.taken for row in rows):
        names = next(row.sparsifier for row in rows if row.sparsifier)
        return (
            f"Advice: use {sync}sparsejax.dense_sync() without {names}: what it lets "
            f"through takes {current:.3g} ms a step, and everything {dense:.3g}."
        )
    zen = _with(groups, rows, times, lambda group: group)
    if zen < _WORTH * dense:
        gain = f"{zen:.3g} ms a step instead of {current:.3g}"
        return f"Advice: use {sync}sparsejax.zen_sync(): {gain}{_if_assumed(rows)}."
    dense_call = "keep" if call == "sparsejax.dense_sync()" else "use"
    if in_rounds:
        return (
            f"Advice: {dense_call} sync=sparsejax.dense_sync(): what ranks move in a round "
            f"is not sparse enough, {current:.3g} ms a step and {dense:.3g} densely. If "
            "training bears it, sparsejax.rounds.sparse_loco sends 0.16 bits of each "
            "number instead of 32, and a larger `every` sends less often."
        )
    dgc = _with(groups, rows, times, _sparsified)
    if dgc < dense / 2:
        return (
            f"Advice: add sparsejax.dgc({_DGC:g}) in front of sparsejax.zen_sync() if "
            f"training bears it, {dgc:.3g} ms a step instead of {dense:.3g}; else "
            f"{dense_call} sparsejax.dense_sync(): nothing here is sparse."
        )
    return (
        f"Advice: {dense_call} sparsejax.dense_sync(): nothing here is sparse enough, "
        f"{current:.3g} ms a step and {dense:.3g} densely."
    )


def _step(rows, name):
    """Returns the milliseconds of a step, on average."""
    return sum((row.milliseconds[name] or 0.0) / row.every for row in rows)


def _but(rows, current, sparser):
    """Returns a clause that names a better call, or the assumption of the advice."""
    # No rule is advised for what is only taken to be dense.
    worse = [row for row in rows if row.verdict and "unknown" not in row.sources]
    if worse:
        text = f'; give {_some([row.name for row in worse])} the rule "dense"'
        if sparser < current / 2:
            text += f", or put sparsejax.dgc({_DGC:g}) in front, if training bears it"
            text += f": {sparser:.3g} ms"
        return text
    return _if_assumed([row for row in rows if row.taken])


def _if_assumed(rows):
    """Returns a clause if the gain depends on an assumed density; else ""."""
    if any("assumed" in row.sources for row in rows):
        return ", if the share of rows that is assumed holds"
    return ""


def _call(rows):
    """Returns the synchronization as a user writes it."""
    names = {row.scheme for row in rows} - {_DENSE}
    if not names:
        return "sparsejax.dense_sync()"
    name = names.pop()
    if names:
        return "the schemes that it names"
    if name in ("Zen", "TwoLevel(Zen)"):
        return "sparsejax.zen_sync()"
    return _SYSTEMS.get(name, f"sparsejax.sync(schemes.{name}(...))")


def _with(groups, rows, times: SchemeTimes, change):
    """Returns the milliseconds of a step with Zen, if `change` were applied to groups."""
    total = 0.0
    for group, row in zip(groups, rows, strict=True):
        own = (row.milliseconds[CHOSEN] or 0.0) / row.every
        is_small = len(group.paths) > 1 and group.scheme.is_dense
        is_kept = group.in_rounds and change is _sparsified
        is_kept = is_kept or group.load.size < SPARSE_FROM or _chooses(group.scheme)
        count = group.load.size if change is _sparsified else group.load.units
        is_kept = is_kept or count > MOST_UNITS
        if is_small or is_kept:
            total += own
            continue
        changed = change(group)
        scheme = _zen(group.scheme)
        seconds = times.seconds(forecast_of(changed, scheme, times.across(changed)))
        total += min(own, 1e3 * seconds / row.every)
    return total


def _chooses(scheme: Scheme) -> bool:
    return isinstance(scheme, LossyScheme)


def _zen(scheme: Scheme) -> Scheme:
    return schemes.Zen(wire_dtype=getattr(scheme, "wire_dtype", None))


def _sparsified(group: Group) -> Group:
    """Returns the group with the load that DGC would leave; rows are left unchanged."""
    if group.ids:
        return group
    load = group.load
    counts = tuple(
        min(load.size * share, load.size) for share in independent(load.ranks, 1, _DGC)
    )
    if load.counts[0] * load.numbers <= counts[0]:
        return group
    load = dataclasses.replace(
        load, units=load.size, numbers=1, counts=counts, skewness=1.0, sum_skewness=1.0
    )
    return dataclasses.replace(group, load=load)


def _some(names: Sequence[str]) -> str:
    """Returns the first three names, and the number of the others, as text."""
    shown = ", ".join(names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
