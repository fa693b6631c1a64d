"""Reads from a transformation which leaves it exchanges together, and how often.

It observes the transformation (`state.observing`): its exchanges, the sparsifiers that
precede them, and the wrappers around either. To these it adds the densities.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax import schemes
from sparsejax.advise.explain.densities import NONE, Densities, IdCounts, NonzeroShares
from sparsejax.advise.planner import joined
from sparsejax.errors import ArgumentError
from sparsejax.schemes.base import Scheme
from sparsejax.schemes.forecast import Load
from sparsejax.sparsifiers import base as sparsifiers
from sparsejax.state import observing
from sparsejax.transforms.buckets import Bucket, joint, tables
from sparsejax.units.row_grads import RowGrads


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that one exchange sums as one array.

    Attributes:
        paths: The paths of the leaves.
        shape: The shape of the leaf, or of all leaves concatenated.
        dtype: The dtype of the leaves.
        unit: What an index refers to, "element" or "row", or "leaf"; see `Row`.
        scheme: The scheme that sums them.
        load: The load, over all ranks.
        sources: The source of the density of each leaf; see `NonzeroShares`.
        sparsifier: The sparsifier that selects from these leaves, if any.
        values: The value code to which it rounds, if it is one for all leaves; else None.
        shared: Whether it selects the same elements on all ranks.
        ids: The number of ids of rows that a rank lists, for `RowGrads`; else 0.
        every: The number of steps for each exchange.
        dense_steps: The number of first exchanges that send everything.
        in_rounds: Whether the offsets of a round of local steps are exchanged.
    """

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    unit: str
    scheme: Scheme
    load: Load
    sources: tuple[str, ...]
    sparsifier: sparsifiers.Sparsifier | None
    values: str | None
    shared: bool
    ids: int
    every: int
    dense_steps: int
    in_rounds: bool

    @property
    def name(self) -> str:
        """The path of the only leaf, or of the first with the number of the others."""
        more = len(self.paths) - 1
        return (self.paths[0] or "value") + (f" and {more} more" if more else "")


def groups_of(
    tx: optax.GradientTransformation,
    params: Any,
    hosts: int,
    known: Densities,
    listed: IdCounts = NONE,
) -> list[Group]:
    """Returns the groups of leaves that a transformation exchanges, in the tree's order.

    Args:
        tx: The transformation.
        params: The parameters, or anything with their shapes and dtypes.
        hosts: The number of ranks of an exchange; for two levels, of hosts.
        known: The densities.
        listed: The numbers of ids that a rank lists.
    """
    seen = observing.observed(tx, params)
    if not seen.exchanges:
        raise ArgumentError(
            "there is no sparsejax synchronization in this transformation: put "
            "sparsejax.zen_sync() first in its chain."
        )
    leaves: dict[str, Any] = {}
    for exchange in seen.exchanges:
        leaves |= zip(exchange.paths, exchange.leaves, strict=True)
    known.check(list(leaves))
    listed.check(leaves)
    groups = []
    for exchange in seen.exchanges:
        exchange.part.assignment.check_ranks(hosts)
        lists = _lists(exchange, known.ranks, hosts, listed)
        members = _members(exchange, seen.sparsifiers, known, lists)
        shared = [m.sparsifier.shared if m.by_entries else None for m in members]
        found = [
            (min(joined[0].leaves), group)
            for joined in joint.together(exchange.buckets, exchange.leaves, shared)
            for group in _groups(joined, exchange, members, lists, known.ranks)
        ]
        # Two groups of one bucket are in the order of their first leaves, too.
        order = {path: place for place, path in enumerate(exchange.paths)}
        found.sort(key=lambda pair: (pair[0], order[pair[1].paths[0]]))
        groups += [group for _, group in found]
    return groups


@dataclasses.dataclass(frozen=True)
class _BucketLeaf:
    """One leaf of a bucket, in the form in which the exchange is given it."""

    path: str
    leaf: Any
    units: int
    shares: NonzeroShares
    sparsifier: Any
    by_entries: bool
    of_elements: bool
    ids: int
    values: str | None = None


def _groups(
    joined: Sequence[Bucket],
    exchange: observing.Part,
    members: Sequence[_BucketLeaf],
    lists: Mapping[str, Sequence["_RowGroup"]],
    ranks: int,
) -> Iterator[Group]:
    """Yields the groups of buckets that are exchanged as one.

    Leaves of a bucket whose gradients are entries are a group of their own, and so are
    leaves of each width whose gradients are rows.
    """
    bucket = joint.as_one(joined, exchange.leaves)
    whole = bucket.shape if bucket.scheme.unit == "leaf" else ()
    by_ranks = bucket.needs_ranks
    bucket = _of_elements(bucket, exchange)
    those = [members[i] for i in bucket.leaves]
    for of_one in lists[bucket.name]:
        found = [members[i] for i in of_one.ids]
        shape = tuple(found[0].leaf.shape[1:])
        rows = dataclasses.replace(bucket, scheme=of_one.scheme, shape=shape)
        yield _group(rows, found, exchange.inside, ranks, False, False)
    those = [m for m in those if not m.ids]
    parts = [those]
    if not by_ranks:
        parts = [[m for m in those if m.by_entries is kind] for kind in (True, False)]
    for part in filter(None, parts):
        as_entries = all(m.by_entries for m in part)
        split = as_entries and len(parts) > 1
        group = _group(bucket, part, exchange.inside, ranks, as_entries, split)
        yield dataclasses.replace(group, load=dataclasses.replace(group.load, shape=whole))


def _of_elements(bucket, exchange):
    """Returns a bucket of whole leaves with elements as units; any other unchanged."""
    if bucket.scheme.unit != "leaf" or not bucket.shape:
        return bucket
    sizes = tuple(exchange.leaves[i].size for i in bucket.leaves)
    return dataclasses.replace(bucket, units=sizes, shape=())


@dataclasses.dataclass(frozen=True)
class _RowGroup:
    """Leaves of a bucket that are sent as lists of rows, in one exchange.

    Attributes:
        scheme: The scheme that sends them.
        ids: The number of ids that a rank lists, by the place of a leaf.
    """

    scheme: Scheme
    ids: Mapping[int, int]


def _lists(exchange, ranks, hosts, listed) -> dict[str, list[_RowGroup]]:
    """Returns the leaves of each bucket that are sent as lists of rows, by its name."""
    pairs = list(zip(exchange.paths, exchange.leaves, strict=True))
    ids = [listed.of(path, leaf) for path, leaf in pairs]
    leaves = [
        _rows(leaf, n) if n else leaf for (_, leaf), n in zip(pairs, ids, strict=True)
    ]
    of_rows = exchange.part.assignment.of_rows(exchange.paths, exchange.leaves)
    found: dict[str, list[_RowGroup]] = {}
    for bucket in exchange.buckets:
        every = tables.listed(bucket, leaves, of_rows, ranks, ranks // hosts)
        found[bucket.name] = [
            _RowGroup(scheme, {i: ids[i] for i in places})
            for scheme, places in every
            if bucket.is_lossy or _sends_rows(scheme)
        ]
    return found


def _rows(leaf, listed):
    """Returns the abstract gradient of a table of which a rank lists `listed` ids."""
    ids = lambda: jnp.zeros(listed, jnp.int32)
    rows = lambda: jnp.zeros((listed, *leaf.shape[1:]), leaf.dtype)
    return jax.eval_shape(lambda: RowGrads(ids(), rows(), tuple(leaf.shape)))


def _sends_rows(scheme):
    """Whether a scheme sends lists of rows; otherwise it is given dense arrays."""
    return not scheme.forecast(Load(1, 1, 1, "float32", (1.0,), room=1, listed=True)).dense


def _members(exchange, before, known, lists) -> list[_BucketLeaf]:
    """Returns the leaves of an exchange, in the order of the tree."""
    found = {}
    for whole in exchange.buckets:
        bucket = _of_elements(whole, exchange)
        ids = {i: n for of_one in lists[whole.name] for i, n in of_one.ids.items()}
        for i, path, units in zip(bucket.leaves, bucket.paths, bucket.units, strict=True):
            leaf = exchange.leaves[i]
            if i in ids:
                found[i] = _table(bucket, path, leaf, ids[i], exchange, before, known)
            else:
                found[i] = _member(bucket, path, leaf, units, exchange, before, known)
    return [found[i] for i in range(len(exchange.leaves))]


def _table(bucket, path, leaf, ids, exchange, before, known):
    """Makes the `_BucketLeaf` of a leaf whose gradient is rows."""
    refused = [type(bucket.scheme).__name__] if bucket.is_lossy else []
    refused += [type(s.part.sparsifier).__name__ for s in before if _selects(s, path, leaf)]
    if not all(w.takes_rows for w in exchange.inside):
        refused.append("local_steps" if _in_rounds(exchange.inside) else "accumulate")
    if refused:
        raise ArgumentError(
            f"ids are given for leaf {path!r}, and {refused[0]} takes whole arrays: no "
            "rows are sent there. Leave ids of it out, or explain a chain without it."
        )
    shares = known.shares_of_rows(path, leaf, ids)
    return _BucketLeaf(path, leaf, leaf.shape[0], shares, None, False, False, ids)


def _member(bucket, path, leaf, units, exchange, before, known):
    """Makes the `_BucketLeaf` of any other leaf, with its density before the exchange."""
    shares = known.shares(path, leaf, units, bucket.shape)
    selecting = next((s for s in before if _selects(s, path, leaf)), None)
    outside = selecting.inside if selecting is not None else exchange.inside
    between = [w for w in exchange.inside if w not in outside]
    if _in_rounds(exchange.inside):
        shares = _moved(shares)
    shares = shares.after(math.prod(w.every for w in outside if not w.is_round))
    sparsifier = None if selecting is None else selecting.part.sparsifier
    later = math.prod(wrapper.every for wrapper in between)
    by_entries = isinstance(sparsifier, sparsifiers.Selector) and later == 1
    of_elements = False
    if isinstance(sparsifier, sparsifiers.Selector) and leaf.size:
        most = sparsifier.expected(leaf.size) / leaf.size
        # It selects elements, even if the unit of the exchange is a row.
        of_elements = most < shares.sums[0] or sparsifier.shared
        if sparsifier.shared:
            # It selects that many in any gradient, and the same on all ranks.
            shares = NonzeroShares((most,) * len(shares.sums), "selected")
        shares = shares.at_most(most, known.ranks)
    shares = shares.after(later)
    values = None if selecting is None else selecting.part.values
    kind = by_entries, of_elements, 0, values
    return _BucketLeaf(path, leaf, units, shares, sparsifier, *kind)


def _dense_exchanges(inside):
    """Returns the number of first exchanges that send densely, given the wrappers."""
    most, runs = 0, 1
    for wrapper in reversed(inside):
        # Of the steps that it counts, one in `runs` is an exchange.
        most, runs = max(most, wrapper.dense_steps // runs), runs * wrapper.every
    return most


def _in_rounds(inside: Sequence[observing.Wrapper]) -> bool:
    return any(wrapper.is_round for wrapper in inside)


def _moved(shares: NonzeroShares) -> NonzeroShares:
    """Returns the shares of non-zero offsets of a round: 1 unless the caller gave others.

    Momentum and decay change parameters without a gradient, so the density of a gradient is
    no estimate.
    """
    if shares.source in ("given", "measured"):
        return shares
    return shares._replace(sums=(1.0,) * len(shares.sums), source="moved")


def _selects(seen: observing.Part, path: str, leaf: Any) -> bool:
    return path in seen.paths and seen.part.sparsifies(path, leaf)


def _group(bucket, members, inside, ranks, as_entries, split):
    """Returns a group of members; with `split`, elements are its units, never rows."""
    shape = () if split else bucket.shape
    width = math.prod(shape)
    loads = []
    for member in members:
        shares, units = member.shares, member.leaf.size if split else member.units
        if shape and member.of_elements:
            shares = shares.by_rows(width)
        counts = tuple(min(share, 1.0) * units for share in shares.sums)
        dtype = str(jnp.dtype(member.leaf.dtype))
        skew = shares.skewness, shares.sum_skewness
        loads.append(Load(ranks, units, width, dtype, counts, *skew))
    load = joined(loads)
    codes = {member.values for member in members}
    values = codes.pop() if len(codes) == 1 else None
    if as_entries:
        rooms = [m.sparsifier.capacity(m.leaf.size) for m in members]
        known = {"values": values, "arrays": len(members)}
        load = dataclasses.replace(load, room=sum(rooms), **known)
    ids = sum(m.ids for m in members)
    if ids:
        load = dataclasses.replace(load, room=ids, listed=True)
    chosen = [member.sparsifier for member in members if member.sparsifier is not None]
    alone = members[0].leaf
    return Group(
        paths=tuple(member.path for member in members),
        shape=tuple(alone.shape) if len(members) == 1 else (load.units, *shape),
        dtype=load.dtype,
        unit=bucket.scheme.unit or ("row" if shape else "element"),
        scheme=bucket.scheme if load.size else schemes.AllReduce(),
        load=load,
        sources=tuple(member.shares.source for member in members),
        sparsifier=chosen[0] if chosen else None,
        values=values,
        shared=as_entries and all(sparsifier.shared for sparsifier in chosen),
        ids=ids,
        every=math.prod(wrapper.every for wrapper in inside),
        dense_steps=_dense_exchanges(inside),
        in_rounds=_in_rounds(inside),
    )
