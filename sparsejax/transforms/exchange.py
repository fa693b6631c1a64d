"""The exchange: the transformation that sums every leaf over the ranks, by buckets.

On the wire: for each bucket in turn, what its scheme sends. An exchange implements `Lossy`,
because a top-k scheme, or PowerSGD, leaves a part out; `feedback` makes the optax
transformation, with a memory for that part. A bucket whose scheme is lossless has no
residual, and the scheme is given its gradients unchanged, dense or as entries.

`RowGrads` are summed by `Scheme.rows`, tables of one width in one exchange. Their sum is
`RowGrads` with distinct ids, whose capacity is at most the height of the table; if a rank
needs one piece of the table, it has the rows of this piece. It stays rows whatever their
number, because an optimizer needs to know which rows have a gradient. The leaf belongs to
the same bucket as if its gradient were an array, and shares the state and metrics of the
bucket, so a state can be made from parameters. If the bucket is summed densely, as that of
small leaves is, rows use the scheme of large leaves where their lists send fewer bytes
(`buckets.tables`). Where they do not, or where a scheme sends no rows, gradient and sum are
dense arrays.

Each bucket is one exchange, unless a sparsifier precedes it: buckets of which it selected
elements, both tables and kernels, are exchanged as one where `buckets.joint` allows it.
Each keeps its own place in the state, which does not record which were joined: the scheme
is given the state of the first, and its new state is stored for all of them. The traffic is
divided among them so that sums over buckets are what was sent (`joint.shared_out`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import axes
from sparsejax.axes import AxisName, as_varying, varying_axes
from sparsejax.errors import AxisError, NeedsRanks, StateError
from sparsejax.schemes import base
from sparsejax.schemes.all_reduce import AllReduce
from sparsejax.schemes.or_dense import suited
from sparsejax.state import finite, observing, sharded, tree
from sparsejax.state.byte_totals import Totals
from sparsejax.state.finite import Sums
from sparsejax.state.per_rank import PerRank, check_kind
from sparsejax.transforms import checks
from sparsejax.transforms.buckets import Assignment, check_ids, joint, pieces, tables
from sparsejax.transforms.checks import Leaves as Leaves
from sparsejax.transforms.entry import Entry, Reduction as Reduction
from sparsejax.transforms.feedback import Accumulated, Outcome
from sparsejax.units.dense import Dense
from sparsejax.units.row_grads import RowGrads, is_row_grads
from sparsejax.wire import ordered
from sparsejax.wire.collectives import Wire, travelling


class ExchangeState(NamedTuple):
    """State of an exchange.

    Attributes:
        schemes: The scheme's state of each bucket, by name. That of a lossy scheme depends
            on values, and so differs by shard: it is `PerRank`, though equal on all ranks.
        traffic: The traffic of the last update, by bucket: see `Traffic.as_one`.
        totals: The traffic of all updates since `init`.
        reduction: The reduction, for resizing the state to another number of ranks.
        leaves: The paths and shapes of the parameters that it was made for.
        sums: Whether the last sums were finite, inside `skip_nonfinite` if they may
            overflow in 16 bits; else None.
    """

    schemes: dict[str, Any]
    traffic: dict[str, jax.Array]
    totals: Totals
    reduction: Reduction
    leaves: Leaves
    sums: Sums | None = None


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Sums the leaves of a tree over the ranks; see `Lossy` for its methods.

    Attributes:
        assignment: The scheme and the unit of each leaf.
        axis_name: The mesh axis of the ranks; the only manual one if None.
        mean: Whether sums are divided by the number of ranks.
        two_level: Whether the axis is a pair (outer, inner) of two levels.
        deterministic: Whether owners add in a fixed order; see `wire.ordered`.
    """

    assignment: Assignment
    axis_name: AxisName | None = None
    mean: bool = True
    two_level: bool = False
    deterministic: bool | None = None

    name = "sparsejax.sync"
    takes_rows = True
    takes_weight = False

    @property
    def entry(self) -> Entry:
        """How its update is entered under `jit`; see `Lossy.entry`."""
        return Entry(self.name, self.axis_name)

    def init(self, params: Any) -> ExchangeState | None:
        """Returns the schemes' first states, which may depend on the ranks."""
        shards = sharded.apart(params)
        paths, leaves, _ = tree.flatten(shards.rest)
        buckets = self._buckets(paths, leaves)
        if observing.is_observing():
            own = sharded.paths_of(params)
            observing.report_exchange(self, paths, leaves, buckets, own)
            return None
        wire = self._wire_if_known()
        states = {}
        for bucket in buckets:
            like = bucket.like(leaves[bucket.leaves[0]].dtype)
            if isinstance(bucket.scheme, base.LossyScheme):
                bucket.scheme.check_size(bucket.name, like.size)
            state = self._first_state(bucket, like, wire)
            if bucket.is_lossy and wire is not None:
                over = varying_axes(leaves[bucket.leaves[0]])
                state = _by_shard(as_varying(state, over), bucket, wire)
            states[bucket.name] = state
        # Each bucket has its own arrays: a donated state must not contain an array twice.
        traffic = {bucket.name: base.no_traffic() for bucket in buckets}
        dtypes = [
            travelling(leaves[bucket.leaves[0]].dtype, bucket.scheme.wire_dtype)
            for bucket in buckets
        ]
        sums = finite.first_sums(paths, dtypes)
        made_for = Reduction(self.mean), Leaves.of(paths, leaves)
        return ExchangeState(states, traffic, Totals.zero(), *made_for, sums)

    def _buckets(self, paths, leaves):
        hidden = tree.may_hide_shards(self.axis_name)
        return self.assignment.buckets(paths, leaves, hidden)

    def _wire_if_known(self):
        """Returns the wire, or None outside `shard_map`: schemes that need it raise."""
        try:
            axis_name = axes.resolve(self.axis_name, f"init of {self.name}")
        except AxisError:
            if axes.manual_axes():
                raise
            return None
        wire = Wire(axis_name)
        self.assignment.check_ranks(self._across(wire).ranks)
        return wire

    def _first_state(self, bucket, like, wire):
        try:
            return bucket.scheme.init(like, wire)
        except NeedsRanks:
            # Raise the same error as every other state by rank.
            why = f"{type(bucket.scheme).__name__} keeps state that depends on the ranks"
            axes.resolve_for_state(self.axis_name, self.name, why)
            raise

    def _across(self, wire):
        """Returns the wire of the outer axis, if the axes are two levels; else `wire`."""
        return wire.along(wire.axis[0]) if self.two_level else wire

    def of_shard(self, path: str, node: Any, wire: Wire) -> Any:
        """Returns the gradient of a sharded parameter, averaged; see `Lossy.of_shard`."""
        return sharded.synchronized(path, node, wire, self.mean)

    def leaves_out(self, paths: Sequence[str], leaves: Sequence[Any]) -> list[bool]:
        """Returns for each leaf whether its scheme is lossy."""
        buckets = self._buckets(paths, leaves)
        lossy = {i for bucket in buckets if bucket.is_lossy for i in bucket.leaves}
        return [i in lossy for i in range(len(leaves))]

    def check(
        self, paths: Sequence[str], leaves: Sequence[Any], state: Any, wire: Wire
    ) -> None:
        """Raises if gradients are summed already, or the state is for other leaves."""
        wire = dataclasses.replace(wire, deterministic=self.deterministic)
        ordered.check(wire, paths, leaves, self.name)
        self.assignment.check_ranks(self._across(wire).ranks)
        buckets = self._buckets(paths, leaves)
        checks.check_leaves(paths, leaves, buckets, wire.axis)
        check_kind(state, ExchangeState, self.name)
        if state.reduction.mean != self.mean:
            words = {True: "reduce='mean'", False: "reduce='sum'"}
            raise StateError(
                f"the state was made with {words[state.reduction.mean]}, and the "
                f"synchronization has {words[self.mean]}: what ranks held would count "
                "differently. Make the state with the transformation that updates it."
            )
        state.leaves.check(paths, leaves, wire)
        checks.check_groups(buckets, state, wire)

    def outline(
        self, paths: Sequence[str], leaves: Sequence[Any], wire: Wire
    ) -> list[jax.Array]:
        """Returns leaves that have the types of the sums; see `Lossy.outline`."""
        del paths
        return [wire.assume_same(tree.to_dense(leaf)) for leaf in leaves]

    def step(self, given: Accumulated, state: ExchangeState, wire: Wire) -> Outcome:
        """Sums the leaves; see `Lossy.step`."""
        paths, accumulated, entered = given.paths, given.leaves, given.entered
        typed = _like(given)
        buckets = self._buckets(paths, typed)
        if given.ids:
            check_ids(buckets, given.ids, given.masked)
            given = given._replace(ids=None) if given.moving else given
        sent, left, schemes, traffic, exchanged = {}, {}, {}, {}, []
        shared = [None if given.dense else joint.is_shared(leaf) for leaf in accumulated]
        chosen = dataclasses.replace(wire, deterministic=self.deterministic)
        # Rules are looked up once for all leaves, and not for each bucket.
        of_rows = self.assignment.of_rows(paths, typed)
        groups = list(joint.together(buckets, accumulated, shared))
        own = accumulated
        if not given.dense:
            accumulated = _without_derivatives(buckets, accumulated)
            given = given._replace(leaves=accumulated)
        for joined in groups:
            befores = [state.schemes[bucket.name] for bucket in joined]
            bucket = joint.as_one(joined, accumulated)
            totals, rest, after, counts = self._exchange(
                bucket, befores[0], given, chosen, of_rows
            )
            names = [bucket.name for bucket in joined]
            schemes |= dict(zip(names, joint.kept(after, befores), strict=True))
            exchanged.append(counts)
            sent |= totals
            left |= rest
        # Traffic may differ by shard, or by part of a host's sum: one collective a step.
        exchanged = self._across(wire).agree(exchanged)
        for joined, counts in zip(groups, exchanged, strict=True):
            parts = joint.shared_out(counts, joined, accumulated)
            for bucket, part in zip(joined, parts, strict=True):
                traffic[bucket.name] = part.as_one()
        lossy = {i for bucket in buckets if bucket.is_lossy for i in bucket.leaves}
        places = range(len(accumulated))
        summed = [self._like_dense(sent[i], own[i], i, given, wire) for i in places]
        sums, in_pieces = state.sums, entered is not None and bool(entered.cut(places))
        sums = None if sums is None else sums.after(summed, wire, in_pieces)
        totals = state.totals.plus(exchanged)
        return Outcome(
            summed,
            [left.get(i) for i in places],
            [i in lossy and not given.dense for i in places],
            state._replace(schemes=schemes, traffic=traffic, totals=totals, sums=sums),
        )

    def _exchange(self, bucket, before, given, wire, of_rows):
        """Exchanges one bucket.

        Returns:
            The totals and the left out parts of its leaves, by the places of the leaves;
            the scheme's next state; and the traffic.
        """
        leaves, likes, ids, entered = given.leaves, given.likes, given.ids, given.entered
        dtype = likes[bucket.leaves[0]].dtype
        may_split = not bucket.needs_ranks
        rows = may_split and any(is_row_grads(leaves[i]) for i in bucket.leaves)
        sent, traffic = ({}, [])
        if rows:
            sent, traffic = self._sums_of_rows(bucket, given, wire, of_rows)
        cut = []
        if entered is not None:
            whole = bucket.without(sent)
            if not bucket.is_lossy:
                found = self._pieces(whole, given, wire)
                sent, traffic = sent | found[0], traffic + found[1]
            cut = entered.cut(whole.without(sent).leaves)
        rest = bucket.without(sent)
        parts = rest.split(leaves) if may_split or not rest.leaves else [rest]
        left, states = {}, [] if parts else [before]
        for part in parts:
            flags = part.flags(leaves, ids) if ids and len(parts) == 1 else None
            units = part.pack(leaves, flags, may_split)
            scheme = suited(part.scheme, units, part.name, wire, given.dense)
            mean = base.mean_asked(scheme.__call__, self.mean)
            if scheme is not part.scheme:
                reduced = scheme(Dense(units.dense()), (), wire, **mean)
                reduced = reduced._replace(state=before)
            elif units.shared:
                narrow = wire.narrowed(scheme.wire_dtype)
                reduced, mean = base.sum_of_shared(units, before, narrow), {}
            else:
                reduced = scheme(units, _on_rank(bucket, before, wire), wire, **mean)
            total = wire.mean_of(reduced.total, self.mean and not mean)
            sent |= part.unpack(total.astype(dtype), likes)
            counts = reduced.traffic
            if part.is_lossy:
                kept = reduced.left
                kept = jnp.zeros(units.shape, units.dtype) if kept is None else kept
                left |= part.unpack(kept, likes)
                # The scheme was given wider numbers than a dense sum would have been.
                dense_bytes = wire.dense_bytes(units.size, dtype)
                counts = counts._replace(dense=jnp.float32(dense_bytes))
            states.append(reduced.state)
            traffic.append(counts)
        for i, at in cut:
            sent[i] = pieces.piece_of(sent[i], at, wire.ranks, wire.rank)
        if entered is not None:
            inside = traffic[0].inside + sum(entered.inside[i] for i in bucket.leaves)
            traffic[0] = traffic[0]._replace(inside=inside)
        # If there are two parts, the sparse one is first; its state is kept.
        after = states[0]
        if bucket.is_lossy:
            after = before if given.dense else _by_shard(after, bucket, wire)
        return sent, left, after, functools.reduce(base.add_traffic, traffic)

    def _like_dense(self, total, leaf, place, given, wire):
        """Returns the sum of a leaf with the derivative of a dense sum, if it has none."""
        if given.leaves[place] is leaf or not isinstance(leaf, jax.Array):
            return total
        at = None if given.entered is None else dict(given.entered.cut([place])).get(place)

        def sum_of(x, dtype=total.dtype):
            x = wire.mean_of(wire.psum(wire.per_rank(x))[0], self.mean)
            x = x if at is None else pieces.piece_of(x, at, wire.ranks, wire.rank)
            return x.astype(dtype)

        return _derived(sum_of, total, leaf)

    def _pieces(self, bucket, given, wire):
        """Returns this rank's pieces of the leaves that are cut, and their traffic."""
        sent, traffic, likes = {}, [], given.likes
        scheme = AllReduce() if given.dense else bucket.scheme
        scatter = given.entered.scatter
        for totals, counts in pieces.summed(bucket, given.leaves, scatter, wire, scheme):
            for i, total in totals.items():
                sent[i] = wire.mean_of(total, self.mean).astype(likes[i].dtype)
            traffic.append(counts)
        return sent, traffic

    def _sums_of_rows(self, bucket, given, wire, of_rows):
        """Returns the sums of leaves whose rows are sent as lists, and their traffic."""
        sent, traffic, leaves = {}, [], given.leaves
        inner = wire.ranks // self._across(wire).ranks
        listed = tables.listed(bucket, leaves, of_rows, wire.ranks, inner)
        for places, add_up in pieces.of_rows(listed, given.entered):
            mean = base.mean_asked(add_up, self.mean)
            summed = add_up([wire.per_rank(leaves[i]) for i in places], wire, **mean)
            if summed is None:
                continue
            for i, total in zip(places, summed.totals, strict=True):
                rows = wire.mean_of(total.rows, self.mean and not mean)
                rows = rows.astype(leaves[i].dtype)
                sent[i] = RowGrads.marked(total.ids, rows, total.shape)
            traffic.append(summed.traffic)
        return sent, traffic


def _without_derivatives(buckets, leaves):
    """Returns leaves without derivatives where values are sent as bits.

    JAX would differentiate bits to 0. A dense leaf of a lossless scheme has the derivative
    of a dense sum instead, and others raise.
    """
    leaves = list(leaves)
    for bucket in buckets:
        for i, path in zip(bucket.leaves, bucket.paths, strict=True):
            is_listed = is_row_grads(leaves[i]) or tree.is_sparse(leaves[i])
            if bucket.is_lossy or is_listed:
                leaves[i] = checks.undifferentiated(leaves[i], path)
            elif not bucket.scheme.is_dense:
                leaves[i] = lax.stop_gradient(leaves[i])
    return leaves


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _derived(sum_of, total, leaf):
    """Returns `total`, of which `sum_of` of the leaf's tangent is the tangent."""
    del sum_of, leaf
    return total


@_derived.defjvp
def _tangent(sum_of, primals, tangents):
    return primals[0], sum_of(tangents[1])


def _on_rank(bucket, state, wire):
    """Returns a scheme's state on this rank."""
    if not bucket.is_lossy:
        return state
    # It differs by shard alone; types do not show that it is equal on all ranks.
    return wire.assume_same(jax.tree.map(lambda x: x[0], state.value))


def _like(given):
    """Returns the leaves; accumulated gradients are cast to the dtypes of gradients."""
    return [
        leaf
        if tree.is_sparse(leaf) or leaf.dtype == like.dtype
        else leaf.astype(like.dtype)
        for leaf, like in zip(given.leaves, given.likes, strict=True)
    ]


def _by_shard(state, bucket, wire):
    """Returns a scheme's state as `PerRank`, which may differ by shard as well."""
    value = wire.per_rank(jax.tree.map(lambda x: x[None], state))
    return PerRank(value, wire.axis, bucket.paths)
