"""Leaves of which each rank needs one piece of the sum, because it trains a shard of them.

A leaf is cut along one dimension into one piece for each rank. Several leaves form one
array: for each rank its piece of the first leaf, then of the second, and so on. So each
rank owns consecutive units (`Scheme.scatter`), and splits their sum into its pieces.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.striping import word_multiple
from sparsejax.schemes.base import Scheme, SummedRows, Traffic
from sparsejax.schemes.or_dense import suited
from sparsejax.state import tree
from sparsejax.transforms.buckets.bucket import Bucket, split
from sparsejax.transforms.buckets.leaf_places import LeafPlaces
from sparsejax.units.dense import Dense
from sparsejax.units.entries import of_tensors
from sparsejax.units.sparse_tensor import SparseTensor
from sparsejax.units.units import Units
from sparsejax.wire.collectives import Wire


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Leaves that are exchanged as one array of pieces.

    Attributes:
        ranks: The number of pieces.
        leaves: The leaves' places in the flattened tree.
        cuts: The dimension along which each is cut.
        shapes: The shape of each.
        unit: The shape of a unit.
        are_entries: Whether the leaves are given as entries.
    """

    ranks: int
    leaves: tuple[int, ...]
    cuts: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    unit: tuple[int, ...]
    are_entries: bool

    @property
    def counts(self) -> list[int]:
        """The number of units in a piece of each leaf."""
        each = self.ranks * max(math.prod(self.unit), 1)
        return [math.prod(shape) // each for shape in self.shapes]

    @property
    def width(self) -> int:
        """The number of units in a piece of all leaves, padded to whole 32-bit words."""
        return word_multiple(sum(self.counts))

    def pack(self, leaves: Sequence[Any]) -> Units:
        """Packs the leaves as one array, [ranks * width, *unit]."""
        own = [leaves[i] for i in self.leaves]
        if self.are_entries:
            return of_tensors([self._entries(own)])
        cut = [
            _cut(tree.to_dense(leaf), at, self.ranks).reshape(self.ranks, count, *self.unit)
            for leaf, at, count in zip(own, self.cuts, self.counts, strict=True)
        ]
        free = self.width - sum(self.counts)
        if free:
            cut.append(jnp.zeros((self.ranks, free, *self.unit), cut[0].dtype))
        whole = jnp.concatenate(cut, axis=1)
        return Dense(whole.reshape(self.ranks * self.width, *self.unit))

    def _entries(self, tensors):
        """Returns the entries of all leaves, indexed by units of the packed array."""
        indices, start = [], 0
        for tensor, count in zip(tensors, self.counts, strict=True):
            units = tensor.kept()
            moved = units // count * self.width + start + units % count
            nowhere = self.ranks * self.width
            indices.append(jnp.where(units < tensor.units, moved, nowhere))
            start += count
        values = jnp.concatenate([tensor.values for tensor in tensors])
        shape = self.ranks * self.width, *self.unit
        distinct = all(tensor.distinct for tensor in tensors)
        return SparseTensor(jnp.concatenate(indices), values, shape, distinct=distinct)

    def unpack(self, total: jax.Array) -> dict[int, jax.Array]:
        """Splits `total`, the sum of this rank's units, into its pieces, by leaf."""
        pieces = split(total, self.counts)
        of = zip(self.leaves, pieces, self.cuts, self.shapes, strict=True)
        return {i: _uncut(piece, at, shape, self.ranks) for i, piece, at, shape in of}


def summed(
    bucket: Bucket,
    leaves: Sequence[Any],
    scatter: Sequence[int | None],
    wire: Wire,
    scheme: Scheme,
) -> Iterator[tuple[dict[int, jax.Array], Traffic]]:
    """Sums the leaves of a bucket that are cut, to this rank's pieces of them.

    Args:
        bucket: The bucket.
        leaves: The leaves of the tree.
        scatter: The dimension along which each leaf is cut, or None.
        wire: The ranks.
        scheme: The scheme that sums them.

    Yields:
        For the leaves of one kind of unit this rank's pieces, by the places of the leaves,
        and the traffic.
    """
    wire = wire.narrowed(bucket.scheme.wire_dtype)
    for group in of_bucket(bucket, leaves, scatter, wire.ranks):
        units = group.pack(leaves)
        used = suited(scheme, units, bucket.name, wire)
        total, traffic = used.scatter(units, sum(group.counts), wire)
        yield group.unpack(total), traffic


def of_bucket(
    bucket: Bucket, leaves: Sequence[Any], scatter: Sequence[int | None], ranks: int
) -> Iterator[Pieces]:
    """Yields the leaves of a bucket that are cut, grouped by the kind of their unit.

    Leaves whose indices are the same on all ranks are left out: only their values are sent.

    Args:
        bucket: The bucket.
        leaves: The leaves of the tree.
        scatter: The dimension along which each leaf is cut, or None.
        ranks: The number of ranks.
    """
    by_kind: dict[Any, list[tuple[int, int]]] = {}
    for i in bucket.leaves:
        leaf, at = leaves[i], scatter[i]
        if at is None or (tree.is_sparse(leaf) and leaf.shared):
            continue
        kind = tree.is_sparse(leaf) and at == 0, _unit(bucket, leaf, at, ranks)
        by_kind.setdefault(kind, []).append((i, at))
    for (are_entries, unit), members in by_kind.items():
        places, cuts = zip(*members, strict=True)
        shapes = tuple(tuple(leaves[i].shape) for i in places)
        yield Pieces(ranks, places, cuts, shapes, unit, are_entries)


def of_rows(
    listed: Iterable[tuple[Scheme, list[int]]], entered: LeafPlaces | None
) -> Iterator[tuple[list[int], Callable[..., SummedRows | None]]]:
    """Yields places of leaves that are rows, with the method that sums these leaves.

    That is `scatter_rows` for leaves of which a rank needs one piece by rows, and `rows`
    for others.

    Args:
        listed: Schemes, each with the places of the leaves that it sums.
        entered: What types do not say about the leaves, if the update was entered.
    """
    for scheme, places in listed:
        cut = [] if entered is None else entered.cut(places)
        cut = [i for i, at in cut if at == 0]
        whole = [i for i in places if i not in cut]
        if whole:
            yield whole, scheme.rows
        if cut:
            yield cut, scheme.scatter_rows


def piece_of(x: jax.Array, at: int, ranks: int, rank: jax.Array) -> jax.Array:
    """Returns a rank's piece, along dimension `at`, of an array that all ranks have."""
    size = x.shape[at] // ranks
    return jax.lax.dynamic_slice_in_dim(x, rank * size, size, at)


def _unit(bucket, leaf, at, ranks):
    """Returns the shape of a unit of a leaf that is cut along dimension `at`."""
    if tree.is_sparse(leaf) and at == 0:
        return leaf.values.shape[1:]
    if not bucket.is_by_rows:
        return ()
    if at == 0:
        return bucket.shape
    return (leaf.shape[1] // ranks,) if leaf.ndim == 2 else ()


def _cut(x, at, ranks):
    """Cuts an array along dimension `at` into its pieces, [ranks, ...]."""
    shape = *x.shape[:at], ranks, x.shape[at] // ranks, *x.shape[at + 1 :]
    return jnp.moveaxis(x.reshape(shape), at, 0)


def _uncut(piece, at, shape, ranks):
    """Reshapes one piece of an array of the given shape to its own shape."""
    return piece.reshape(*shape[:at], shape[at] // ranks, *shape[at + 1 :])
