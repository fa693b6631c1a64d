"""Leaves whose gradients are rows: which are sent as lists, and which in one exchange.

Only the size of an array is known at trace time, so a small one joins the dense sum. The
number of rows that a rank lists in `RowGrads` is known, too, so they are sent as lists if
these take fewer bytes than the dense sum, assuming that the rows of all ranks are distinct.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from sparsejax.schemes.base import LossyScheme, Scheme
from sparsejax.schemes.forecast import Load, merged
from sparsejax.state import tree
from sparsejax.transforms.buckets.bucket import Bucket
from sparsejax.units.row_grads import is_row_grads
from sparsejax.wire.ladder import ROUND


# Lists are sent in an exchange of their own if those of all tables together save this
# number of bytes.
LISTED_FROM = ROUND // 16


def listed(
    bucket: Bucket,
    leaves: Sequence[Any],
    of_rows: Sequence[Scheme],
    ranks: int,
    inner: int = 1,
) -> Iterator[tuple[Scheme, list[int]]]:
    """Yields the leaves of a bucket that are sent as lists of rows, for each exchange.

    Args:
        bucket: The bucket.
        leaves: The leaves of the tree.
        of_rows: The scheme that each leaf has if its gradient is rows.
        ranks: The number of ranks.
        inner: The number of ranks on a host, if there are two levels.

    Yields:
        A scheme, and the places of leaves of one width and dtype.
    """
    by_kind: dict[Any, list[int]] = {}
    for i in bucket.leaves:
        leaf = leaves[i]
        if is_row_grads(leaf):
            there = bool(leaf.capacity and leaf.size)
            kind = of_rows[i], leaf.shape[1:], leaf.dtype, tree.axes_of(leaf), there
            by_kind.setdefault(kind, []).append(i)
    for (scheme, *_), places in by_kind.items():
        if bucket.scheme.is_dense:
            rows = [leaves[i] for i in places]
            found = [Table(leaf.shape, leaf.dtype, leaf.capacity) for leaf in rows]
            worth = worth_listing(found, scheme, ranks, inner)
            places = [i for i, pays in zip(places, worth, strict=True) if pays]
        if places:
            yield scheme, places


class Table(NamedTuple):
    """A table whose gradient is rows.

    Attributes:
        shape: The shape of the table.
        dtype: The dtype of the rows.
        listed: The number of ids that a rank lists, repeats included.
    """

    shape: tuple[int, ...]
    dtype: Any
    listed: int


def worth_listing(
    tables: Sequence[Table], scheme: Scheme, ranks: int, inner: int = 1
) -> list[bool]:
    """Returns for each of some tables of one width whether it is sent as a list of rows.

    Args:
        tables: The tables.
        scheme: The scheme that would send the lists.
        ranks: The number of ranks.
        inner: The number of ranks on a host, if there are two levels.
    """
    saved = [_saved(table, scheme, ranks, inner) for table in tables]
    is_enough = sum(max(of_one, 0.0) for of_one in saved) >= LISTED_FROM
    return [is_enough and of_one > 0 for of_one in saved]


def _saved(table, scheme, ranks, inner):
    """Returns the bytes that a rank saves by lists of rows, against the dense sum."""
    height, numbers = table.shape[0], math.prod(table.shape[1:])
    is_given_rows = table.listed and not isinstance(scheme, LossyScheme)
    if not is_given_rows or not height * numbers:
        return 0.0
    counts = tuple(float(min(n * table.listed, height)) for n in merged(ranks))
    dtype = str(jnp.dtype(table.dtype))
    load = Load(ranks, height, numbers, dtype, counts, room=table.listed, listed=True)
    load = load.part(inner) if inner > 1 else load
    return load.all_reduce(scheme.wire_dtype).bytes - scheme.forecast(load).bytes
