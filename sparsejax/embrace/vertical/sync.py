"""EmbRace's synchronization as an optax transformation: see `embrace.vertical`."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax import arguments, axes, errors, schemes
from sparsejax.axes import AxisName
from sparsejax.embrace.column_table import ColumnTable, Unsent
from sparsejax.embrace.exchange import TableLists
from sparsejax.embrace.vertical import sending
from sparsejax.embrace.vertical.next_ids import MISSING, checked
from sparsejax.embrace.vertical.split import Chosen, among, split
from sparsejax.errors import ArgumentError
from sparsejax.rows.capacity import Capacity, check_capacity
from sparsejax.schemes.base import Scheme, Stage, Traffic, no_traffic
from sparsejax.state import observing, pending as held, sharded, tree
from sparsejax.state.byte_totals import Totals
from sparsejax.state.pending import Pending
from sparsejax.state.per_rank import OUTLINE, check_kind
from sparsejax.transforms.buckets import ByTables, Rules
from sparsejax.transforms.checks import check_weight
from sparsejax.transforms.described import described
from sparsejax.transforms.exchange import ExchangeState, Leaves, Reduction
from sparsejax.transforms.feedback import FeedbackState
from sparsejax.transforms.sync import check_scheme, sync
from sparsejax.units.merging import merged
from sparsejax.units.row_grads import LateRowGrads
from sparsejax.wire.collectives import Wire


# The baselines of the paper, by name: schemes for tables that each rank has whole.
_REPLICATED = {
    "zen": schemes.Zen(),
    "all_reduce": schemes.AllReduce(),
    "all_gather": schemes.AGSparse(),
    "parallax": schemes.SparsePS(),
}
_NAME = "sparsejax.embrace_sync"


class EmbraceState(NamedTuple):
    """The state of `embrace_sync(vertical=True)`.

    Attributes:
        inner: The state for all leaves that are not sharded by columns.
        pending: The delayed rows of each table, by path.
        stale: int32 [], the number of rows that were read while a part of their gradient
            was delayed, because the batch was not the announced one. It should be 0.
        tables: The traffic of tables, for `sparsejax.metrics`.

    Example:
        >>> users = sparsejax.ColumnTable.create(jax.random.key(0), 100, 8, mesh)
        >>> state = sparsejax.init(sparsejax.embrace_sync(), {"users": users}, mesh)
        >>> isinstance(state, sparsejax.embrace.EmbraceState)
        True
    """

    inner: Any
    pending: dict[str, Pending]
    stale: jax.Array
    tables: FeedbackState


@described
def embrace_sync(
    axis_name: AxisName | None = None,
    *,
    vertical: bool = True,
    delayed: Capacity = 1024,
    replicated: str | Scheme = "zen",
    reduce: str = "mean",
    rules: Rules | None = None,
    deterministic: bool | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients as EmbRace does, given the rows that the next batch reads.

    Rows of a `ColumnTable` that the next step does not read are delayed: they are sent
    while that step runs (`sparsejax.embrace.vertical`).

    `sparsejax.data_parallel` supports it with `trainer.step(state, batch, next_batch)` and
    `sparsejax.embrace.lookahead`. In a `shard_map` of your own, compute gradients with
    `sparsejax.embrace.value_and_grad`, and give `update` the ids that this rank reads in
    the next step: `next_ids=sparsejax.embrace.rows_read(loss_fn)(params, next_batch)`, or
    None at the end of the data. It must be followed by a `sparsejax.lazy` optimizer, which
    can apply delayed rows. Before parameters are saved or read otherwise, call
    `trainer.flush(state)`, or `sparsejax.embrace.flush`.

    If the next step reads other rows than were announced, delayed rows among them are
    read one step old. They are counted in `stale` of the state, and none is lost. With
    `data_parallel` this happens only if ids depend on parameters or variables, since it
    flushes before a batch that was not announced. With several processes it does not flush,
    and warns (`UntoldBatchWarning`).

    Args:
        axis_name: The mesh axis of the ranks; the only manual one if None.
        vertical: Whether rows are delayed. If False, a `ColumnTable` is trained as by any
            other synchronization, and the next batch is not needed.
        delayed: The number of rows of a table that a rank can delay: one number, or a
            mapping from regular expressions, searched in the paths, to numbers; 0 without a
            match. That many are sent in each step; further rows are not delayed. Half of
            the distinct rows that a rank reads in a step is a good number.
        replicated: The scheme for large tables that each rank has whole (those with
            "embedding" in their path, or "sparse" by rules): "zen", "all_reduce",
            "all_gather" (AGsparse), "parallax" (a sparse parameter server), or a scheme.
        reduce: "mean" or "sum".
        rules: See `sparsejax.sync`; for leaves that are not sharded by columns.
        deterministic: See `sparsejax.sync`.

    Returns:
        An `optax.GradientTransformationExtraArgs`, to be chained before the optimizer.

    Raises:
        ArgumentError: `replicated`, `delayed`, `reduce` or `axis_name` cannot be used.
        RuleError: A pattern of `delayed` is not a regular expression. Other rules are
            checked against the parameters by `init`.

    Example:
        >>> tx = optax.chain(sparsejax.embrace_sync(), sparsejax.lazy(optax.adam(1e-3)))
        >>> trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
        >>> state = trainer.init(params)
        >>> for batch, next_batch in sparsejax.embrace.lookahead(batches):
        ...     state, loss = trainer.step(state, batch, next_batch)

    References:
        Li et al., EmbRace: Accelerating Sparse Communication for Distributed Training of
        NLP Neural Networks, ICPP 2022, section 4.2.2
    """
    axes.check_axis_name(axis_name, _NAME)
    if isinstance(replicated, str):
        arguments.check_one_of("replicated", replicated, tuple(_REPLICATED))
    scheme = _REPLICATED[replicated] if isinstance(replicated, str) else replicated
    check_scheme(scheme)
    tables, by_pattern = ByTables(scheme, rules), check_capacity(delayed, "delayed")
    inner = sync(tables, axis_name, reduce=reduce, deterministic=deterministic)
    if not vertical:
        return inner
    return tree.transformation(*_Vertical(inner, axis_name, by_pattern, reduce).functions)


class _Vertical:
    """The functions of the transformation that delays rows.

    Args:
        inner: The transformation of all leaves that are not sharded by columns.
        axis_name: The mesh axis of the ranks.
        delayed: The number of rows of a table that a rank delays, by patterns of paths.
        reduce: "mean" or "sum".
    """

    name, takes_weight = _NAME, False

    def __init__(self, inner, axis_name, delayed: Mapping[str, int], reduce):
        self.inner, self.axis_name, self.delayed = inner, axis_name, delayed
        self.mean = reduce == "mean"
        self.functions = self.init, self.update

    def __repr__(self):
        return f"embrace_sync(delayed={dict(self.delayed)}, mean={self.mean})"

    def init(self, params):
        """Returns the first state, without delayed rows."""
        inner = self.inner.init(params)
        shards = sharded.apart(params)
        if observing.is_observing():
            observing.report_ahead(self, shards.paths)
            return inner
        pending = {}
        if shards.paths:
            why = f"{_NAME} holds rows of tables back on each rank"
            axis_name = axes.resolve_for_state(self.axis_name, _NAME, why)
            ranks = Wire(axis_name).ranks
            for path, table in zip(shards.paths, shards.nodes, strict=True):
                pending[path] = self._nothing(path, table, axis_name, ranks)
        return EmbraceState(inner, pending, jnp.int32(0), self._counts())

    def _nothing(self, path, table, axis_name, ranks):
        columns = table.columns_on(ranks, f"the table {path!r}")
        height, room = columns.shape[0], min(self.room(path), columns.shape[0])
        rows = jnp.zeros((1, room, columns.shape[1] * ranks), columns.dtype)
        rows = Wire(axis_name).per_rank(axes.as_varying(rows, axes.varying_axes(columns)))
        ids = jnp.full((ranks, room), height, jnp.int32)
        rows = held.per_rank(rows, path, axis_name, jnp.int32(ranks))
        return Pending(ids, rows, height, table.dim)

    def room(self, path: str) -> int:
        """Returns the number of rows of a table that a rank can delay."""
        matching = [n for p, n in self.delayed.items() if re.search(p, path)]
        return matching[0] if matching else 0

    def _counts(self):
        traffic = {name: no_traffic() for name in _SENT}
        made_for = Reduction(self.mean), Leaves(())
        exchange = ExchangeState({}, traffic, Totals.zero(), *made_for)
        return FeedbackState(jnp.int32(0), None, None, None, exchange)

    def update(self, updates, state, params=None, *, next_ids=MISSING, **extra):
        """Sends delayed and prior rows; see `embrace_sync`."""
        check_kind(state, EmbraceState, f"{_NAME} (vertical=True)")
        wire = Wire.over(self.axis_name, f"update of {_NAME}")
        if OUTLINE.get():
            return self.inner.update(updates, state.inner, params, **extra)[0], state
        if extra.get("weight") is not None:
            check_weight(self, updates, remembers=False)
        shards = sharded.apart(updates)
        rest, inner = self.inner.update(shards.rest, state.inner, params, **extra)
        if not shards.paths:
            return rest, state._replace(inner=inner)
        step = TableUpdate(self, wire, shards, state)
        nodes, after = step.taken(checked(_NAME, next_ids, shards.paths))
        return shards.together(rest, nodes), after._replace(inner=inner)


_SENT = ("next ids", "prior rows", "delayed rows")


class TableUpdate:
    """One update of the tables.

    Args:
        of: The transformation.
        wire: The wire.
        shards: The gradients of the tables.
        state: The state.
    """

    def __init__(self, of, wire, shards, state):
        self.of, self.wire, self.state, self.paths = of, wire, state, shards.paths
        if {*state.pending} != {*shards.paths}:
            raise errors.StateError(
                f"the gradients have the tables {sorted(shards.paths)}, and the state "
                f"holds back rows of {sorted(state.pending)}: make the state with the "
                "parameters that are trained, sparsejax.init(tx, params, mesh)."
            )
        self.tables: list[ColumnTable] = shards.nodes
        self.held = [state.pending[path] for path in shards.paths]
        for path, table, own in zip(self.paths, self.tables, self.held, strict=True):
            sharded.check_axis(path, _without_value(table), wire.axis)
            if not isinstance(table.value, Unsent):
                raise ArgumentError(
                    f"{_NAME}(vertical=True) sends the rows of {path!r} itself, and its "
                    "gradient was sent in the backward pass, or is dense: take it with "
                    "sparsejax.embrace.value_and_grad(loss_fn), as sparsejax.data_parallel "
                    f"does, and let nothing change it; or take {_NAME}(vertical=False)."
                )
            height, columns = table.value.shape
            own.check(path, wire.ranks, (height, columns * wire.ranks))
        self.ids = [table.value.ids for table in self.tables]
        self.heights = [table.value.shape[0] for table in self.tables]

    def taken(self, next_ids):
        """Exchanges rows; returns the gradients for the optimizer, and the next state.

        Args:
            next_ids: For each table the ids that this rank reads next; None at the end.
        """
        wire, of = self.wire, self.of
        rows = [own.rows.value[0] for own in self.held]
        # The names of the exchanges in profiles and compiled programs.
        with jax.named_scope("delayed rows"):
            late, of_late = sending.columns_of(wire, rows)
        with jax.named_scope("next ids"):
            coming, of_ids = self._gathered(next_ids)
        now, waiting = [], []
        for at, (ids, height) in enumerate(zip(self.ids, self.heights, strict=True)):
            room = min(of.room(self.paths[at]), height)
            flags = split(ids, coming[at], height, room)
            now.append(Chosen.of(flags[0], ids, height, ids.shape[1]))
            waiting.append(Chosen.of(flags[1], ids, height, room))
        mine = [
            x.rows_of(table.value.rows, wire.rank)
            for x, table in zip(now, self.tables, strict=True)
        ]
        with jax.named_scope("prior rows"):
            counts = [x.counts for x in now]
            prior, of_prior = sending.columns_of(wire, mine, counts)
        nodes, pending = [], {}
        for at, (path, table) in enumerate(zip(self.paths, self.tables, strict=True)):
            both = LateRowGrads.of(
                self._arrived(now[at].ids, prior[at], at),
                self._arrived(self.held[at].ids, late[at], at),
            )
            nodes.append(ColumnTable(both, table.dim, table.axis_name))
            pending[path] = self._kept(at, waiting[at])
        stale = [
            jnp.sum(among(ids, own.ids, height), dtype=jnp.int32)
            for ids, own, height in zip(self.ids, self.held, self.heights, strict=True)
        ]
        traffic = [
            self._traffic(of_ids, None),
            self._traffic(of_prior, counts),
            self._traffic(of_late, self._of_held()),
        ]
        state = self.state._replace(
            pending=pending,
            stale=self.state.stale + sum(stale, jnp.int32(0)),
            tables=self._counted(traffic),
        )
        return nodes, state

    def _gathered(self, next_ids):
        """Gathers the ids that any rank reads next, by table; returns the bytes, too."""
        if next_ids is None:
            return [None] * len(self.paths), 0.0
        lists = []
        for path, height in zip(self.paths, self.heights, strict=True):
            ids = jnp.asarray(next_ids[path]).reshape(-1)
            ids = jnp.where(ids < 0, ids + height, ids)
            lists.append(merged(ids, height).ids[: min(ids.size, height)])
        lists = self.wire.per_rank(lists)
        return TableLists.of(self.wire, [x.size for x in lists]).gathered(lists, 0)

    def _arrived(self, ids, rows, at):
        """Makes one gradient of this rank's columns from the rows of all ranks."""
        rows = self.wire.mean_of(rows, self.of.mean)
        return held.row_grads(ids, rows, self.heights[at])

    def _kept(self, at, waiting):
        """Returns the rows of a table that this rank delays."""
        own, rows = self.held[at], self.tables[at].value.rows
        rows = waiting.rows_of(rows, self.wire.rank)[None]
        ranks = jnp.int32(self.wire.ranks)
        rows = held.per_rank(rows, self.paths[at], own.rows.axis_name, ranks)
        return Pending(waiting.ids, rows, own.height, own.dim)

    def _of_held(self):
        return [jnp.sum(own.ids < own.height, axis=1, dtype=jnp.int32) for own in self.held]

    def _traffic(self, sent, counts):
        """Returns the traffic of one exchange; the payload is that of the fullest rank.

        Args:
            sent: The bytes sent.
            counts: int32 [n] for each table, the numbers of rows; None for ids.
        """
        one, none = jnp.float32(1), jnp.float32(0)
        sent, n = jnp.float32(sent), self.wire.ranks
        if counts is None:
            stage = Stage(none, none, none, one)
            none = Traffic.of_one(no_traffic())
            return none._replace(push=stage, pull=Stage(sent, sent, one, one))
        tables = list(zip(self.tables, counts, self.heights, strict=True))
        each = [
            jnp.max(x).astype(jnp.float32)
            * (t.value.rows.shape[1] * t.value.rows.dtype.itemsize * (n - 1) / n)
            for t, x, _ in tables
        ]
        every = jnp.float32(sum(self.heights))
        density = sum((jnp.max(x) for _, x, _ in tables), jnp.int32(0)) / every
        dense = sum(
            self.wire.dense_bytes(height * t.dim, t.value.rows.dtype)
            for t, _, height in tables
        )
        return Traffic(
            Stage(sent, sum(each, none), one, one),
            Stage(none, none, none, one),
            none,
            jnp.float32(dense),
            density,
            density,
            none,
        )

    def _counted(self, counts):
        before = self.state.tables
        counts = [self.wire.agree(self.wire.assume_same(traffic)) for traffic in counts]
        exchange = before.inner._replace(
            traffic={k: x.as_one() for k, x in zip(_SENT, counts, strict=True)},
            totals=before.inner.totals.plus(counts),
        )
        return before._replace(step=before.step + 1, inner=exchange)


def _without_value(table):
    return ColumnTable(None, table.dim, table.axis_name)
