"""Densities of gradients: measured in a step, or read from a running state.

`profile` counts the non-zero units of each leaf in the gradients of one step: those of one
rank, and those of the sums over 2, 4, ... and all ranks. It is called inside `shard_map`,
on local gradients:

    def of_step(params, batch):
        grads = jax.grad(loss_fn)(sparsejax.local(params, "data"), batch)
        return sparsejax.profile(grads, "data")

    of_step = jax.jit(jax.shard_map(
        of_step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    profiles.append(of_step(params, batch))

On the wire: one packed bit for each unit, log2 n times, combined by "or". Each time it is
about 1/32 of a dense gradient. If that is too much, `profile_from_state` reads the
densities of buckets from the metrics of a running synchronization.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sparsejax import axes, schemes
from sparsejax.axes import AxisName
from sparsejax.errors import PlanError
from sparsejax.schemes.base import Traffic
from sparsejax.schemes.forecast import Load, merged
from sparsejax.schemes.zen import growth
from sparsejax.state import sharded, tree
from sparsejax.state.per_rank import find
from sparsejax.transforms.buckets import Bucket, ByRules, Rules
from sparsejax.transforms.exchange import ExchangeState
from sparsejax.units import bits
from sparsejax.units.indices import check_numbered
from sparsejax.wire.collectives import Wire


class LeafProfile(NamedTuple):
    """The density of one leaf in the gradient of one step, equal on all ranks.

    Attributes:
        counts: float32 [sums]: the non-zero units of the fullest rank, and of the fullest
            of the sums over 2, 4, ... and all ranks.
        skewness: float32 []: with the units divided into n equal ranges for n ranks, the
            non-zero units of the fullest range divided by the mean, on the rank where it is
            largest (Zen, definition 5).
        sum_skewness: float32 []: the skewness of the sum.
        ranks: int32 []: the number of ranks.
        shape: int32 [axes]: the shape of the leaf; None if it is unknown.

    Example:
        >>> watch = lambda grads: sparsejax.profile(sparsejax.local(grads))
        >>> watch = jax.shard_map(watch, mesh=mesh, in_specs=P(), out_specs=P())
        >>> seen = jax.eval_shape(watch, {"users": jnp.zeros((1000, 300))})
        >>> isinstance(seen["users"], sparsejax.advise.profile.LeafProfile)
        True
    """

    counts: jax.Array
    skewness: jax.Array
    sum_skewness: jax.Array
    ranks: jax.Array
    shape: jax.Array | None = None


def profile(
    grads: Any, axis_name: AxisName | None = None, *, rules: Rules | None = None
) -> dict[str, LeafProfile]:
    """Measures how sparse the gradients of one step are, inside `jax.shard_map`.

    Args:
        grads: The gradients of this rank, not yet synchronized.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        rules: The rules of `sparsejax.sync`, which say which leaves have rows as units.

    Returns:
        The profile of each leaf by path, equal on all ranks, so that `out_specs=P()` fits.
        Small leaves have none, nor does a `ColumnTable`, which no synchronization sends.

    Example:
        >>> watch = lambda grads: sparsejax.profile(sparsejax.local(grads))
        >>> watch = jax.shard_map(watch, mesh=mesh, in_specs=P(), out_specs=P())
        >>> table = {"users": jnp.zeros((1000, 300)).at[:10].set(1.0)}
        >>> seen = jax.jit(watch)(table)
        >>> int(seen["users"].ranks)
        4

    See Also:
        `sparsejax.advise.profile_from_state`: reads them from a running synchronization.
        `sparsejax.make_plan`: makes a plan from profiles.
    """
    axis_name = axes.resolve(axis_name, "sparsejax.profile")
    paths, leaves, _ = tree.flatten(sharded.apart(grads).rest, "sparsejax.profile")
    parts = [
        (i, path, (units, *bucket.shape))
        for bucket in _sparse_buckets(paths, leaves, rules)
        for i, path, units in zip(bucket.leaves, bucket.paths, bucket.units, strict=True)
    ]
    for i, path, (units, *_) in parts:
        axes.require_local(path, leaves[i], axis_name)
        check_numbered(f"leaf {path!r}", units)

    def measured(leaves):
        units = {path: leaves[i].reshape(shape) for i, path, shape in parts}
        return {k: _measure(bits.nonzero_units(x), axis_name) for k, x in units.items()}

    found = axes.all_manual(measured, axis_name)(leaves)
    shapes = {path: leaves[i].shape for i, path, _ in parts}
    return {k: x._replace(shape=_as_numbers(shapes[k])) for k, x in found.items()}


def _as_numbers(shape):
    return jnp.asarray(shape, jnp.int32)


def _sparse_buckets(paths, leaves, rules) -> list[Bucket]:
    """Returns the buckets of leaves that `zen_sync` would not sum densely."""
    buckets = ByRules(schemes.Zen(), rules).buckets(paths, leaves)
    return [b for b in buckets if not b.scheme.is_dense]


def _measure(flags, axis_name):
    wire, units = Wire(axis_name), len(flags)
    n = wire.ranks
    width = -(-units // (32 * n)) * 32
    words = bits.pack(jnp.pad(flags, (0, n * width - units)))

    def count_and_skewness(words):
        by_range = jnp.sum(jax.lax.population_count(words.reshape(n, -1)), axis=1)
        by_range = by_range.astype(jnp.float32)
        count = jnp.sum(by_range)
        skewness = n * jnp.max(by_range) / jnp.maximum(count, 1)
        return jnp.stack([count, jnp.maximum(skewness, 1)])

    sums = [count_and_skewness(words)]
    distance = 1
    while distance < n:
        # Receive from the rank `distance` ahead: then this rank has the union of twice as
        # many ranks. Bits of a rank may be received twice, so any number of ranks is right.
        back = tuple((source, (source - distance) % n) for source in range(n))
        words = words | wire.permute(words, back)[0]
        sums.append(count_and_skewness(words))
        distance *= 2
    most, _ = wire.maximum(jnp.stack(sums))
    return LeafProfile(most[:, 0], most[0, 1], most[-1, 1], jnp.int32(n))


def profile_from_state(
    opt_state: Any, params: Any, *, ranks: int, rules: Rules | None = None
) -> dict[str, LeafProfile]:
    """Reads profiles from the last step of a running `zen_sync`.

    They come from its metrics. Leaves that were exchanged together have the same densities.
    Skewness is unknown, and taken to be 1.

    Args:
        opt_state: An optimizer state with the state of `zen_sync` in it.
        params: The parameters, or their shapes and dtypes.
        ranks: The number of ranks.
        rules: The rules that `zen_sync` was given.

    Returns:
        The profile of each leaf by path, for `make_plan`.

    Example:
        >>> opt_state = sparsejax.init(tx, params, mesh)
        >>> seen = sparsejax.advise.profile_from_state(opt_state, params, ranks=4)

    See Also:
        `sparsejax.profile`: measures gradients, their skewness included.
        `sparsejax.make_plan`: makes a plan from profiles.
    """
    paths, leaves, _ = tree.flatten(sharded.apart(params).rest)
    states = find(opt_state, ExchangeState)
    traffics = {name: traffic for sync in states for name, traffic in sync.traffic.items()}
    scheme_states = {name: state for sync in states for name, state in sync.schemes.items()}
    traffics = tree.here(traffics)
    profiles = {}
    for bucket in _sparse_buckets(paths, leaves, rules):
        if bucket.name not in traffics:
            raise PlanError(
                f"the state has no group {bucket.name!r}; it has {sorted(traffics)}. Pass "
                "the state, the parameters and the rules of one zen_sync."
            )
        traffic, curve = Traffic.of_one(traffics[bucket.name]), growth.unknown()
        if isinstance(scheme_states[bucket.name], schemes.ZenState):
            curve = tree.here(scheme_states[bucket.name].curve)
        ends = traffic.density_before, traffic.density_after
        shares = growth.stretched(curve, ranks, *ends)[: len(merged(ranks))]
        places = zip(bucket.leaves, bucket.paths, bucket.units, strict=True)
        for i, path, units in places:
            even, shape = jnp.float32(1), _as_numbers(leaves[i].shape)
            counts, n = shares * units, jnp.int32(ranks)
            profiles[path] = LeafProfile(counts, even, even, n, shape)
    return profiles


def load_of(profiles, path, leaf, units, shape, ranks) -> Load:
    """Returns the load of one leaf, with the largest densities of all profiles.

    Args:
        profiles: The results of `profile`, one for each step.
        path: The path of the leaf.
        leaf: The leaf, or its shape and dtype.
        units: The number of its units.
        shape: The shape of a unit.
        ranks: The number of ranks.
    """
    for profile in profiles:
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(profile.get(path))):
            raise PlanError(
                f"the profile of {path!r} has no numbers yet: it was kept while a function "
                "was traced, and sparsejax.profile must be what that returns. seen.append("
                "profiled(params, batch)), where profiled = jax.jit(jax.shard_map(lambda "
                "params, batch: sparsejax.profile(jax.grad(loss_fn)(sparsejax.local(params"
                "), batch)), mesh=mesh, in_specs=(P(), P('data')), out_specs=P()))."
            )
    try:
        of_leaf = [jax.tree.map(np.asarray, profile[path]) for profile in profiles]
    except KeyError:
        raise PlanError(
            f"the profiles have no leaf {path!r}; they have {sorted(profiles[0])}. Profile "
            "the gradients of the same parameters, with the same rules."
        ) from None
    others = [int(profile.ranks) for profile in of_leaf if profile.ranks != ranks]
    if others:
        raise PlanError(
            f"the profiles were taken on {others[0]} ranks, and here there are {ranks}: "
            "profile on as many ranks."
        )
    for profile in of_leaf:
        if profile.shape is not None and tuple(profile.shape) != tuple(leaf.shape):
            raise PlanError(
                f"the profile of {path!r} is of a gradient {profile.shape.tolist()}, and "
                f"the parameter is {list(leaf.shape)}: profile the gradients of these "
                "parameters, sparsejax.profile(grads)."
            )
    counts = np.max([profile.counts for profile in of_leaf], axis=0)
    return Load(
        ranks,
        units,
        math.prod(shape),
        str(jnp.dtype(leaf.dtype)),
        tuple(min(float(count), units) for count in counts),
        max(float(profile.skewness) for profile in of_leaf),
        max(float(profile.sum_skewness) for profile in of_leaf),
    )
