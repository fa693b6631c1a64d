"""Makes a plan from the densities of some steps.

    profiles.append(of_step(params, batch))  # the result of sparsejax.profile
    network = sparsejax.Network(gbit_per_s=25, latency_us=20)
    plan = sparsejax.make_plan(profiles, params, ranks=8, network=network)

`make_plan` forecasts the time of each candidate on JAX's default platform, and chooses the
fastest scheme for each leaf. For Balanced Parallelism it fixes the cheapest index codes, so
that only those are compiled, and capacities, which are the needs of the profiled steps
times `headroom`. Leaves of a bucket with the same scheme share these, and are exchanged as
one array.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import arguments, schemes
from sparsejax.advise.network import check_network
from sparsejax.advise.plan import LeafPlan, Plan
from sparsejax.advise.profile import LeafProfile, load_of
from sparsejax.errors import ArgumentError
from sparsejax.schemes.base import LossyScheme, Scheme
from sparsejax.schemes.forecast import Load, Network, for_platform
from sparsejax.state import sharded, tree
from sparsejax.transforms.buckets import ByRules, Rules, check_rules
from sparsejax.transforms.sync import narrowed
from sparsejax.wire import index_codes


def make_plan(
    profiles: Sequence[Mapping[str, LeafProfile]],
    params: Any,
    *,
    ranks: int,
    network: Network,
    candidates: Sequence[Scheme] | None = None,
    headroom: float = 1.25,
    inner: int = 1,
    rules: Rules | None = None,
    wire_dtype: jax.typing.DTypeLike | None = None,
) -> Plan:
    """Makes the plan that would have been fastest in the profiled steps.

    Args:
        profiles: Results of `profile` or `profile_from_state`, one for each step. For the
            `sync` of `sparsejax.local_steps`, profiles of the offsets.
        params: The parameters, or their shapes and dtypes.
        ranks: The number of ranks; for an exchange of two levels, of hosts.
        network: Bandwidth and latency between the ranks.
        candidates: The schemes to choose from besides the dense sum. If None: the two
            optima of Zen's Theorem 1, and an all-gather of the entries (`AGSparse`).
        headroom: The capacity of a message, as a multiple of the largest profiled need.
        inner: The number of ranks of a host, for an exchange of two levels. The profiles
            are then of all ranks of all hosts.
        rules: The rules of `sparsejax.sync`. "dense", schemes and units in them are kept.
        wire_dtype: The `wire_dtype` of `sparsejax.sync`, of all schemes that have one.

    Returns:
        A `Plan`, for `sparsejax.sync(plan)`.

    Raises:
        ArgumentError: A number is out of range, `network` is not a `Network`, a candidate
            is not a lossless scheme, or there is no profile.
        LeafError: A parameter is not a floating-point array.
        RuleError: A rule matches no leaf, or has an unknown value.
        PlanError: The profiles are of other parameters, of another number of ranks, or were
            kept while a function was traced.

    Example:
        >>> table = {"users": jnp.zeros((1000, 300)).at[:10].set(1.0)}
        >>> watch = lambda grads: sparsejax.profile(sparsejax.local(grads))
        >>> watch = jax.shard_map(watch, mesh=mesh, in_specs=P(), out_specs=P())
        >>> network = sparsejax.Network(gbit_per_s=25, latency_us=20)
        >>> seen = [jax.jit(watch)(table)]
        >>> plan = sparsejax.make_plan(seen, table, ranks=4, network=network)
        >>> [leaf.path for leaf in plan.leaves]
        ['users']

    See Also:
        `sparsejax.profile`: measures gradients.
        `sparsejax.advise.profile_from_state`: reads profiles from a running
        synchronization.
    """
    check_network(network)
    for name, value in (("ranks", ranks), ("inner", inner)):
        arguments.check_whole(name, value, 1)
    arguments.check_positive("headroom", headroom, 0, 1e6)
    if isinstance(profiles, Mapping) or not profiles:
        raise ArgumentError(
            "profiles must be a list of results of sparsejax.profile, one a step, got "
            + ("one result alone: put it in a list." if profiles else "none.")
        )
    check_rules(rules)
    arguments.check_dtype("wire_dtype", wire_dtype)
    travels = lambda scheme: _travelling(scheme, wire_dtype)
    options = [travels(scheme) for scheme in _options(candidates)]
    paths, leaves, _ = tree.flatten(sharded.apart(params).rest)
    buckets = ByRules(schemes.Zen(), rules).map(travels).buckets(paths, leaves)
    choices: dict[int, tuple[Scheme, str, str]] = {}
    for bucket in buckets:
        unit = "row" if bucket.shape else "element"
        if not isinstance(bucket.scheme, schemes.Zen):
            choices |= {
                i: (bucket.scheme, unit, "by size or by rule") for i in bucket.leaves
            }
            continue
        loads = {}
        by_scheme: dict[Scheme, list[int]] = {}
        for i, path, units in zip(bucket.leaves, bucket.paths, bucket.units, strict=True):
            load = load_of(profiles, path, leaves[i], units, bucket.shape, ranks * inner)
            loads[i] = load.part(inner) if inner > 1 else load
            scheme, note = _fastest(loads[i], options, network)
            choices[i] = (scheme, unit, note)
            by_scheme.setdefault(scheme, []).append(i)
        # Leaves of one scheme are exchanged as one array, with capacities for all of them.
        for scheme, members in by_scheme.items():
            tight = tightened(scheme, joined([loads[i] for i in members]), headroom)
            choices |= {i: (tight, *choices[i][1:]) for i in members}
    plans = []
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        scheme, unit, note = choices[i]
        shape, dtype = tuple(leaf.shape), str(jnp.dtype(leaf.dtype))
        plans.append(LeafPlan(path, shape, dtype, unit, scheme, note))
    return Plan(ranks, tuple(plans))


def _travelling(scheme: Any, wire_dtype: jax.typing.DTypeLike | None) -> Scheme:
    """Returns a scheme with a wire dtype, if one is given and the scheme can have one."""
    names = {field.name for field in dataclasses.fields(scheme)}
    if wire_dtype is None or not names & {"wire_dtype", "across"}:
        return scheme
    return narrowed(scheme, wire_dtype)


def _options(candidates) -> tuple[Scheme, ...]:
    """Returns the schemes to choose from, the dense sum first."""
    for scheme in candidates or ():
        if not isinstance(scheme, Scheme) or isinstance(scheme, LossyScheme):
            raise ArgumentError(f"candidates must be lossless schemes, got {scheme!r}.")
    if candidates is None:
        candidates = (
            schemes.BalancedParallelism(),
            schemes.HierarchicalCentralization(),
            schemes.AGSparse(code="auto"),
        )
    return (schemes.AllReduce(), *candidates)


def _fastest(load: Load, options: Sequence[Scheme], network: Network) -> tuple[Scheme, str]:
    """Returns the fastest scheme, and a note on why; the first option is the dense sum."""
    if load.size == 0:
        return options[0], "empty"
    with for_platform(jax.default_backend()):
        forecasts = [scheme.forecast(load) for scheme in options]
    seconds = [forecast.seconds(network) for forecast in forecasts]
    best = int(np.argmin(seconds))
    if forecasts[best].dense:
        best = 0
    before, after = (load.counts[k] / max(load.units, 1) for k in (0, -1))
    note = (
        f"one rank has {before:.2%} of the units, the sum {after:.2%}; takes "
        f"{seconds[best] / max(seconds[0], 1e-30):.2f} of the time of a dense sum"
    )
    return options[best], note


def joined(loads: Sequence[Load]) -> Load:
    """Returns the load of leaves that are exchanged as one array."""
    counts = zip(*(load.counts for load in loads), strict=True)
    return dataclasses.replace(
        loads[0],
        units=sum(load.units for load in loads),
        counts=tuple(float(sum(of_leaves)) for of_leaves in counts),
        skewness=max(load.skewness for load in loads),
        sum_skewness=max(load.sum_skewness for load in loads),
    )


def tightened(scheme: Scheme, load: Load, headroom: float) -> Scheme:
    """Fixes the capacities and index codes of Balanced Parallelism for a load.

    Other schemes are returned unchanged.
    """
    if not isinstance(scheme, schemes.BalancedParallelism):
        return scheme
    n = load.ranks
    width = scheme.ownership.width(load.units, n)
    balanced = scheme.ownership.balanced

    def room(which, sets):
        need = load.fullest_part(which, width, balanced, sets)
        return max(1, min(math.ceil(headroom * need), width))

    def cheapest(allowed, capacity):
        room = -(-capacity // 4) * 4
        return index_codes.cheapest(room, width, index_codes.parse(allowed)).name

    # Slots of a hash memory are not in ascending order, and need 32 bits each.
    ascend = scheme.ownership.memory is None
    push, pull = room(0, n), room(1, 1)
    return dataclasses.replace(
        scheme,
        push_code=cheapest(scheme.push_code if ascend else "coo32", push),
        pull_code=cheapest(scheme.pull_code, pull),
        push_capacity=push,
        pull_capacity=pull,
        ratio=4.0,
    )
