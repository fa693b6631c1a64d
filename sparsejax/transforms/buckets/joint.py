"""Buckets that are exchanged as one: those of which a sparsifier selected the elements.

Buckets are made from parameters, before it is known what stands in front of the exchange:
a table is one of rows, a kernel one of elements. What a sparsifier lets through is elements
of both, and so nothing separates them any more: laid end to end they cost one set of
collectives, and the compile time of one. Which buckets these are follows from how their
leaves come, so it is asked again in every program.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.schemes.all_reduce import AllReduce
from sparsejax.schemes.base import MOST_UNITS, Stage, Traffic
from sparsejax.state import tree
from sparsejax.transforms.buckets.bucket import Bucket


def together(
    buckets: Sequence[Bucket], leaves: Sequence[Any], shared: Sequence[bool | None]
) -> list[list[Bucket]]:
    """Lists of buckets that are exchanged as one, in the order of their first.

    They have equal lossless schemes without tables, one dtype and the same varying axes,
    and all of their leaves come by their elements, which are the same on all ranks for all
    of them or are not. A dense sum is not among them: it would only cost a copy.

    Args:
        buckets: All buckets.
        leaves: The leaves of the tree, or their shapes and dtypes.
        shared: Of each leaf, whether all ranks have the same elements of it; None where it
            does not come by its elements.
    """
    lists: list[list[Bucket]] = []
    open_: dict[Any, tuple[list[Bucket], int]] = {}
    for bucket in buckets:
        kind = _kind(bucket, leaves, shared)
        count = sum(leaves[i].size for i in bucket.leaves)
        joined, taken = open_.get(kind, ([], 0))
        # Units are numbered by int32: further ones start another exchange.
        if kind is None or not joined or taken + count > MOST_UNITS:
            joined, taken = [], 0
            lists.append(joined)
        joined.append(bucket)
        if kind is not None:
            open_[kind] = joined, taken + count
    return lists


def as_one(buckets: Sequence[Bucket], leaves: Sequence[Any]) -> Bucket:
    """The elements of several buckets as one; a single bucket unchanged."""
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
    """Whether ranks have the same elements of a gradient; None if it is not given by any.

    Entries that are rows are not elements: a table's own exchange sends an index a row.
    """
    by_elements = tree.is_sparse(leaf) and leaf.values.ndim == 1
    return leaf.shared if by_elements else None


def kept(after: Any, befores: Sequence[Any]) -> list[Any]:
    """The state that each bucket keeps of one exchange.

    What the scheme handed on as it was stays the bucket's own: an array that stands in the
    state twice could not be donated.

    Args:
        after: The scheme's state after the exchange.
        befores: Each bucket's before it; the scheme was given the first.
    """
    first, *others = befores

    def one(own):
        same = lambda new, given, own: own if new is given else new
        return jax.tree.map(same, after, first, own)

    return [after, *map(one, others)]


def shared_out(
    traffic: Traffic, buckets: Sequence[Bucket], leaves: Sequence[Any]
) -> list[Traffic]:
    """The traffic of one exchange, by its buckets; their sum is what was sent.

    Bytes go by the room that a bucket has for entries, in whole numbers, and the first has
    what is left of them, and all rounds. The bytes of a dense sum go by how many elements
    there are. Densities and imbalances are those of the exchange.

    Args:
        traffic: What was sent.
        buckets: The buckets that were exchanged as one.
        leaves: The leaves of the tree; given by their entries where there are several.
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
    """What buckets have in common that are exchanged as one; None if it stays alone."""
    of_leaves = [shared[i] for i in bucket.leaves]
    is_dense = isinstance(bucket.scheme, AllReduce)
    is_whole = bucket.is_lossy or bucket.scheme.unit == "leaf"
    if None in of_leaves or is_dense or is_whole or bucket.needs_ranks:
        return None
    first = leaves[bucket.leaves[0]]
    # A state that follows the number of units could not be handed from one to the other.
    states, structure = jax.tree.flatten(bucket.first_state())
    shapes = tuple((x.shape, x.dtype) for x in states)
    dtype, over = jnp.dtype(first.dtype), tree.axes_of(first)
    return bucket.scheme, dtype, over, all(of_leaves), structure, shapes
