"""Watches the first steps and makes a plan.

`profile` measures one step's gradients: how many units of each leaf one rank has, and how
many the sums over 2, 4, ... and all ranks have. Inside `shard_map`, on local gradients:

    seen.append(sparsejax.profile(grads, "data"))
    plan = sparsejax.make_plan(seen, params, ranks=8, gbit_per_s=25, latency_us=20)

On the wire it is packed bits, a bit a unit, log2 n times, joined by "or": each about 1/32
of a dense gradient. Where that is too much, `profile_from_state` takes what the
metrics of a running synchronization tell, by group of leaves.

`make_plan` reckons what each candidate would send (`forecast`), and takes for each leaf the
one that is soonest done. It names the index codes that are cheapest there, so that only
those are compiled, and capacities with head-room, so that messages are as long as steps
were seen to need. Leaves that go together get one scheme, with room for all.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import axes, errors, schemes, wire
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError, PlanError
from sparsejax.schemes.base import Scheme
from sparsejax.schemes.forecast import Load, fullest_part, merged
from sparsejax.schemes.zen import growth
from sparsejax.transforms import buckets as leaf_rules
from sparsejax.transforms.plan import LeafPlan, Plan
from sparsejax.transforms.state.per_rank import find
from sparsejax.units import bits
from sparsejax.wire import index_codes


class LeafProfile(NamedTuple):
    """What one step's gradient of one leaf was like; equal on all ranks.

    Attributes:
        counts: float32 [sums]: non-zero units of the fullest rank, and of the fullest of
            the sums over 2, 4, ... and all ranks.
        skewness: The fullest of as many equal ranges as ranks over the mean one, of the
            rank where it is worst (Zen, definition 5).
        sum_skewness: The same, of the sum.
        ranks: On how many ranks it was taken.
    """

    counts: jax.Array
    skewness: jax.Array
    sum_skewness: jax.Array
    ranks: jax.Array


def profile(
    grads: Any, axis_name: AxisName | None = None, *, rules: leaf_rules.Rules | None = None
) -> dict[str, LeafProfile]:
    """Measures how sparse the gradients of one step are; call it inside `shard_map`.

    Args:
        grads: The gradients of this rank, not yet synchronized.
        axis_name: The axis of the ranks; the only manual one if None.
        rules: As in `sparsejax.sync`: they say which leaves go by rows.

    Returns:
        By path, for every leaf that is not small, what it was like. The same on all ranks:
        leave `shard_map` with `out_specs=P()`.
    """
    axis_name = axes.resolve(axis_name, "sparsejax.profile")
    paths, leaves, _ = leaf_rules.flatten(grads)
    groups = leaf_rules.group(paths, leaves, schemes.Zen(), rules)
    found = {}
    for group in groups:
        if isinstance(group.scheme, schemes.AllReduce):
            continue
        for i, path, units in zip(group.leaves, group.paths, group.units, strict=True):
            axes.require_local(path, leaves[i], axis_name)
            flags = bits.nonzero_units(leaves[i].reshape(units, *group.shape))
            found[path] = _measure(flags, axis_name)
    return found


def _measure(flags, axis_name):
    n, units = wire.ranks(axis_name), len(flags)
    width = -(-units // (32 * n)) * 32
    words = bits.pack(jnp.pad(flags, (0, n * width - units)))

    def told(words):
        by_range = jnp.sum(jax.lax.population_count(words.reshape(n, -1)), axis=1)
        by_range = by_range.astype(jnp.float32)
        count = jnp.sum(by_range)
        skew = n * jnp.max(by_range) / jnp.maximum(count, 1)
        return jnp.stack([count, jnp.maximum(skew, 1)])

    seen = [told(words)]
    distance = 1
    while distance < n:
        # From the rank so far ahead: then this rank has what twice as many have. What is
        # had twice does no harm, so any number of ranks will do.
        back = tuple((source, (source - distance) % n) for source in range(n))
        words = words | wire.permute(words, axis_name, back)[0]
        seen.append(told(words))
        distance *= 2
    most, _ = wire.maximum(jnp.stack(seen), axis_name)
    return LeafProfile(most[:, 0], most[0, 1], most[-1, 1], jnp.int32(n))


def profile_from_state(
    opt_state: Any, params: Any, *, ranks: int, rules: leaf_rules.Rules | None = None
) -> dict[str, LeafProfile]:
    """What the last step of a running `zen_sync` tells of the leaves.

    Leaves that went together share what is known of them. Of skewness nothing is.

    Args:
        opt_state: An optimizer state with a synchronization by `zen_sync` in it.
        params: The parameters, or their shapes and dtypes.
        ranks: How many ranks there were.
        rules: The rules that `zen_sync` had.
    """
    paths, leaves, _ = leaf_rules.flatten(params)
    groups = leaf_rules.group(paths, leaves, schemes.Zen(), rules)
    known = {name: one for sync in find(opt_state) for name, one in sync.traffic.items()}
    curves = {name: one for sync in find(opt_state) for name, one in sync.schemes.items()}
    found = {}
    for group in groups:
        if isinstance(group.scheme, schemes.AllReduce):
            continue
        if group.name not in known:
            raise PlanError(
                f"the state has no group {group.name!r}; it has {sorted(known)}. Pass the "
                "state, the parameters and the rules of one zen_sync."
            )
        traffic, curve = known[group.name], growth.unknown()
        if isinstance(curves[group.name], schemes.ZenState):
            curve = curves[group.name].curve
        ends = traffic.density_before, traffic.density_after
        shares = growth.stretched(curve, ranks, *ends)[: len(merged(ranks))]
        for path, units in zip(group.paths, group.units, strict=True):
            one = jnp.float32(1)
            found[path] = LeafProfile(shares * units, one, one, jnp.int32(ranks))
    return found


def make_plan(
    profiles: Sequence[Mapping[str, LeafProfile]],
    params: Any,
    *,
    ranks: int,
    gbit_per_s: float,
    latency_us: float,
    candidates: Sequence[Scheme] | None = None,
    headroom: float = 1.25,
    inner: int = 1,
    rules: leaf_rules.Rules | None = None,
    wire_dtype: jax.typing.DTypeLike | None = None,
) -> Plan:
    """Makes the plan that would have been soonest done with the steps that were seen.

    Args:
        profiles: Of one or more steps: results of `profile` or `profile_from_state`.
        params: The parameters, or their shapes and dtypes.
        ranks: How many ranks there are; hosts, where there are two levels.
        gbit_per_s: What a rank's link carries, in one direction.
        latency_us: How long an empty message takes.
        candidates: Schemes to choose from beside the dense sum; if None the two optima of
            Zen's Theorem 1, and all entries to all in one round.
        headroom: Room in a message over the most that was seen.
        inner: Ranks of a host, where there are two levels; the profiles are then of all
            ranks of all hosts.
        rules: As in `sparsejax.sync`. "dense", a scheme, and units are kept as they are.
        wire_dtype: As in `sparsejax.sync`.
    """
    for name, value in (("gbit_per_s", gbit_per_s), ("headroom", headroom)):
        if not 0 < value <= 1e6:
            raise ArgumentError(f"{name} must be positive and finite, got {value!r}.")
    if not 0 <= latency_us <= 1e9:
        raise ArgumentError(f"latency_us must not be negative, got {latency_us!r}.")
    for name, value in (("ranks", ranks), ("inner", inner)):
        errors.check_whole(name, value, 1)
    if isinstance(profiles, Mapping) or not profiles:
        raise ArgumentError(
            "profiles must be a list of results of sparsejax.profile, one a step, got "
            + ("one result alone: put it in a list." if profiles else "none.")
        )
    leaf_rules.check_rules(rules)
    for scheme in candidates or ():
        if not isinstance(scheme, Scheme) or not scheme.lossless:
            raise ArgumentError(f"candidates must be lossless schemes, got {scheme!r}.")
    if candidates is None:
        candidates = (
            schemes.BalancedParallelism(wire_dtype=wire_dtype),
            schemes.HierarchicalCentralization(wire_dtype=wire_dtype),
            schemes.AGSparse(code="auto", wire_dtype=wire_dtype),
        )
    paths, leaves, _ = leaf_rules.flatten(params)
    groups = leaf_rules.group(paths, leaves, schemes.Zen(wire_dtype=wire_dtype), rules)
    dense = schemes.AllReduce(wire_dtype)
    chosen: dict[int, tuple[Scheme, str, str]] = {}
    for group in groups:
        unit = "row" if group.shape else "element"
        if not isinstance(group.scheme, schemes.Zen):
            chosen |= {i: (group.scheme, unit, "by size or by rule") for i in group.leaves}
            continue
        loads = {}
        together: dict[Scheme, list[int]] = {}
        for i, path, units in zip(group.leaves, group.paths, group.units, strict=True):
            load = load_of(
                profiles, path, units, group.shape, leaves[i].dtype, ranks * inner
            )
            loads[i] = load.part(inner) if inner > 1 else load
            best, note = _soonest(loads[i], (dense, *candidates), gbit_per_s, latency_us)
            chosen[i] = (best, unit, note)
            together.setdefault(best, []).append(i)
        # Leaves of one scheme go as one array, with room for all of them.
        for scheme, members in together.items():
            tight = tightened(scheme, joined([loads[i] for i in members]), headroom)
            chosen |= {i: (tight, *chosen[i][1:]) for i in members}
    plans = []
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        scheme, unit, note = chosen[i]
        shape, dtype = tuple(leaf.shape), str(jnp.dtype(leaf.dtype))
        plans.append(LeafPlan(path, shape, dtype, unit, scheme, note))
    return Plan(ranks, tuple(plans))


def _soonest(load, options, gbit_per_s, latency_us):
    """The scheme that is soonest done, the first of them being the dense sum, and why."""
    if load.size == 0:
        return options[0], "empty"
    seconds = [scheme.forecast(load).seconds(gbit_per_s, latency_us) for scheme in options]
    best = int(np.argmin(seconds))
    if options[best].forecast(load).dense:
        best = 0
    before, after = (load.counts[k] / max(load.units, 1) for k in (0, -1))
    note = (
        f"one rank has {before:.2%} of the units, the sum {after:.2%}; takes "
        f"{seconds[best] / max(seconds[0], 1e-30):.2f} of the time of a dense sum"
    )
    return options[best], note


def load_of(profiles, path, units, shape, dtype, ranks) -> Load:
    """The load of one leaf: the most that was seen of it."""
    try:
        seen = [jax.tree.map(np.asarray, one[path]) for one in profiles]
    except KeyError:
        raise PlanError(
            f"the profiles have no leaf {path!r}; they have {sorted(profiles[0])}. Profile "
            "the gradients of the same parameters, with the same rules."
        ) from None
    others = [int(one.ranks) for one in seen if one.ranks != ranks]
    if others:
        raise PlanError(
            f"the profiles were taken on {others[0]} ranks, and here there are {ranks}: "
            "profile on as many ranks."
        )
    counts = tuple(float(c) for c in np.max([one.counts for one in seen], axis=0))
    return Load(
        ranks,
        units,
        math.prod(shape),
        str(jnp.dtype(dtype)),
        tuple(min(count, units) for count in counts),
        max(float(one.skewness) for one in seen),
        max(float(one.sum_skewness) for one in seen),
    )


def joined(loads: Sequence[Load]) -> Load:
    """The load of leaves that are exchanged as one array."""
    first = loads[0]
    return dataclasses.replace(
        first,
        units=sum(load.units for load in loads),
        counts=tuple(
            float(sum(load.counts[k] for load in loads)) for k in range(len(first.counts))
        ),
        skewness=max(load.skewness for load in loads),
        sum_skewness=max(load.sum_skewness for load in loads),
    )


def tightened(scheme: Scheme, load: Load, headroom: float) -> Scheme:
    """Balanced Parallelism with room for such a load and the codes that suit it."""
    if not isinstance(scheme, schemes.BalancedParallelism):
        return scheme
    n = load.ranks
    width = scheme.ownership.width(load.units, n)
    balanced = scheme.ownership.balanced

    def room(count, skewness, sets):
        need = fullest_part(count, n, width, balanced, skewness, sets)
        return max(1, min(math.ceil(headroom * need), width))

    def code(given, capacity):
        room = -(-capacity // 4) * 4
        return index_codes.cheapest(room, width, index_codes.parse(given)).name

    push = room(load.counts[0], load.skewness, n)
    pull = room(load.counts[-1], load.sum_skewness, 1)
    return dataclasses.replace(
        scheme,
        push_code=code(scheme.push_code, push),
        pull_code=code(scheme.pull_code, pull),
        push_capacity=push,
        pull_capacity=pull,
        ratio=4.0,
    )
