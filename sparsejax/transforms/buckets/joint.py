"""Buckets that are exchanged as one, because a sparsifier selected elements of them.

Buckets are made from parameters, before the transformations upstream of the exchange are
known: tables have the unit row, kernels the unit element. A sparsifier selects elements of
both, so nothing separates them any longer: concatenated, they cost the collectives and the
compile time of one bucket. Which buckets these are depends on the form of their gradients,
so it is determined whenever an update is traced.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.schemes.base import MOST_UNITS, Stage, Traffic
from sparsejax.state import tree
from sparsejax.transforms.buckets.bucket import Bucket


def together(
    buckets: Sequence[Bucket], leaves: Sequence[Any], shared: Sequence[bool | None]
) -> list[list[Bucket]]:
    """Groups the buckets that are exchanged as one, in the order of their first ones.

    The buckets of a group have equal lossless schemes without tables, one dtype and the
    same varying axes. All their leaves are given as entries that are elements, and either
    all or none have the same indices on all ranks. Buckets with a dense sum stay alone: to
    join them would only cost a copy.

    Args:
        buckets: All buckets.
        leaves: The leaves of the tree, or their shapes and dtypes.
        shared: For each leaf, whether all ranks have the same indices of it; None if it is
            not given as elements.
    """
    lists: list[list[Bucket]] = []
    open_: dict[Any, tuple[list[Bucket], int]] = {}
    for bucket in buckets:
        kind = _kind(bucket, leaves, shared)
        count = sum(leaves[i].size for i in bucket.leaves)
        joined, taken = open_.get(kind, ([], 0))
        # Indices of units are int32: units beyond their range start another exchange.
        if kind is None or not joined or taken + count > MOST_UNITS:
            joined, taken = [], 0
            lists.append(joined)
        joined.append(bucket)
        if kind is not None:
            open_[kind] = joined, taken + count
    return lists


def as_one(buckets: Sequence[Bucket], leaves: Sequence[Any]) -> Bucket:
    """Returns one bucket of the elements of several; a single bucket is unchanged."""
    if len(buckets) == 1:
        return buckets[0]
    places = tuple(i for bucket in buckets for i in bucket.leaves)
    return dataclasses.replace(
        buckets[0],
        leaves=places,
        paths=tuple(path for bucket in buckets for path in bucket.paths),
        units=tuple(leaves[i].size for i in places),
        shape=(),
    )


def is_shared(leaf: Any) -> bool | None:
    """Returns whether ranks have the same indices of a leaf; None if it has no elements.

    It has none if it is an array, or if its entries are rows: the exchange of a table sends
    one index a row.
    """
    by_elements = tree.is_sparse(leaf) and leaf.values.ndim == 1
    return leaf.shared if by_elements else None


def kept(after: Any, befores: Sequence[Any]) -> list[Any]:
    """Returns the state of each bucket after a joint exchange.

    Where the scheme returned an array of its state unchanged, each bucket keeps its own: a
    state that contains an array twice cannot be donated.

    Args:
        after: The scheme's state after the exchange.
        befores: The state of each bucket before it; the scheme was given the first.
    """
    first, *others = befores

    def one(own):
        same = lambda new, given, own: own if new is given else new
        return jax.tree.map(same, after, first, own)

    return [after, *map(one, others)]


def shared_out(
    traffic: Traffic, buckets: Sequence[Bucket], leaves: Sequence[Any]
) -> list[Traffic]:
    """Divides the traffic of one exchange among its buckets; its sum is unchanged.

    Bytes are divided in proportion to capacities, in whole bytes; the first bucket has the
    rest, and all rounds. The bytes of a dense sum are divided in proportion to elements.
    Densities and imbalances are those of the exchange.

    Args:
        traffic: The traffic of the exchange.
        buckets: The buckets that were exchanged as one.
        leaves: The leaves of the tree, given as entries if there are several buckets.
    """
    if len(buckets) == 1:
        return [traffic]
    rooms = [sum(leaves[i].capacity for i in bucket.leaves) for bucket in buckets]
    sizes = [sum(leaves[i].size for i in bucket.leaves) for bucket in buckets]

    def share(count, by):
        others = [jnp.round(count * (x / max(sum(by), 1))) for x in by[1:]]
        return [count - sum(others), *others]

    def stages(of):
        rounds = [of.rounds] + [jnp.zeros_like(of.rounds)] * (len(buckets) - 1)
        bytes_ = share(of.wire, rooms), share(of.payload, rooms)
        return [
            Stage(*counts, of.imbalance) for counts in zip(*bytes_, rounds, strict=True)
        ]

    before, after = traffic.density_before, traffic.density_after
    parts = zip(
        stages(traffic.push),
        stages(traffic.pull),
        share(traffic.scalars, rooms),
        share(traffic.dense, sizes),
        share(traffic.inside, rooms),
        strict=True,
    )
    return [
        Traffic(push, pull, scalars, dense, before, after, inside)
        for push, pull, scalars, dense, inside in parts
    ]


def _kind(bucket, leaves, shared):
    """Returns a key, equal for buckets that may be joined; None for one that may not."""
    of_leaves = [shared[i] for i in bucket.leaves]
    is_dense = bucket.scheme.is_dense
    is_whole = bucket.is_lossy or bucket.scheme.unit == "leaf"
    if None in of_leaves or is_dense or is_whole or bucket.needs_ranks:
        return None
    first = leaves[bucket.leaves[0]]
    # Joined buckets share a state, so its shapes must not depend on the number of units.
    states, structure = jax.tree.flatten(bucket.first_state())
    shapes = tuple((x.shape, x.dtype) for x in states)
    dtype, over = jnp.dtype(first.dtype), tree.axes_of(first)
    return bucket.scheme, dtype, over, all(of_leaves), structure, shapes
