"""Reads tables for a loss, of which some rows are late: they have missed steps."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.sharding import NamedSharding, PartitionSpec

from sparsejax.axes import axis_names, further_axes, manual_axes, mesh_of
from sparsejax.errors import ArgumentError, AxisError
from sparsejax.rows.reads import Ids
from sparsejax.rows.replay import Lookup
from sparsejax.rows.updates import layout as layouts
from sparsejax.rows.updates.call import Rows
from sparsejax.rows.updates.catch_up.fading import FadingSums
from sparsejax.rows.updates.optimizer import RowOptimizer
from sparsejax.rows.updates.shards import TableShards, every_row, typed_as
from sparsejax.rows.updates.snapshot import Snapshot, gathered_rows
from sparsejax.rows.updates.state import LazyState, find
from sparsejax.schemes.owners import row_requests
from sparsejax.state.parameters import ranks_of
from sparsejax.state.tree import promoting
from sparsejax.units.merging import Merge
from sparsejax.units.row_grads import ReadBy, ReadRowGrads, RowGrads
from sparsejax.wire.collectives import Wire


# The error where late rows would be read on Auto axes.
ON_AUTO_AXES = (
    "lazy: read= inside sparsejax.per_replica: rows that are late catch up where they are "
    "read, in loops of each device's own length, and axes that are left to XLA may shard "
    "the table. Leave read out, and take sparsejax.lazy(tx, exact=False), or an optimizer "
    "in which a gradient of zero changes nothing, as SGD without momentum and Adagrad; or "
    "make the mesh with Explicit axes, as jax.make_mesh does by default."
)


class ReadRows(NamedTuple):
    """Rows that a loss has read.

    Attributes:
        merge: The distinct ids that were read, and the position among them of each id that
            the gradient lists.
        rows: The distinct rows, caught up: see `Snapshot.caught_up`.
    """

    merge: Merge
    rows: Rows


class LateRowReader:
    """Reads rows as the dense optimizer has them, from tables in which some are late.

    The gradient of rows that it has read is a `ReadRowGrads`, which contains the rows that
    were caught up to read them. An update that is given the reader uses these again.

    Args:
        optimizer: The optimizer.
        params: The parameters.
        state: The state of the optimizer, or of a chain that contains it.
    """

    @promoting()
    def __init__(self, optimizer: RowOptimizer, params: Any, state: Any):
        names, leaves, _ = layouts.flatten(params)
        self._leaves = dict(zip(names, leaves, strict=True))
        state = find(state)
        params = optimizer.params_of(params, state)
        paths, _, _ = layouts.flatten(params)
        self._numbers = {path: at for at, path in enumerate(paths)}
        self._snapshot = Snapshot(optimizer, params, params, state)
        self._by = ReadBy()
        self.optimizer = optimizer
        if self._snapshot.plan.moving:
            _check_axes()

    @promoting()
    def rows(self, path: str, ids: Ids) -> tuple[jax.Array, ReadRows | None]:
        """Reads rows of a table.

        Args:
            path: The path of the table among the parameters.
            ids: The ids, of any shape; for `ids.read` out of range the nearest row is read.

        Returns:
            The rows, [*ids.read.shape, ...], and the `ReadRows` if they may be late.
        """
        at, read, snapshot = self._numbers.get(path), ids.read, self._snapshot
        if (mesh := mesh_of(self._leaf(path))) is not None and not mesh.manual_axes:
            if manual_axes():  # made outside of the shard_map that reads
                raise ArgumentError(ON_AUTO_AXES)
            if mesh_of(read) is not None:
                return self._by_shard(path, read, mesh), None
        if at is None or not snapshot.way(at).moves or not read.size:
            return gathered_rows(self._leaves[path], read), None
        merge = snapshot.merged(at, read.reshape(-1), snapshot.due(at))
        rows = snapshot.caught_up(at, merge)
        # A row that was read for an id out of range is listed with a gradient of zero: the
        # step that the dense optimizer takes for it, too.
        is_listed = ids.listed.reshape(-1) < snapshot.shapes[at].shape[0]
        places = jnp.where(is_listed, merge.places, merge.ids.shape[0])
        made = ReadRows(merge._replace(places=places), rows)
        return gathered_rows(rows.param, merge.places.reshape(read.shape)), made

    def _by_shard(self, path, ids, mesh):
        """Reads rows on an explicit mesh; the device that holds a row catches it up."""
        at, table = self._numbers.get(path), self._leaves[path]
        by_rows, of_ids = self._check_shards(path, ids), jax.typeof(ids).sharding.spec
        over, spec = axis_names(by_rows or ()), PartitionSpec(by_rows)
        height = table.shape[0] // ranks_of(mesh, over)

        def asked(rows_of, ids):
            return row_requests.read(ids, height, Wire(over), rows_of)

        if at is None or not self._snapshot.way(at).moves:
            table = typed_as(table, NamedSharding(mesh, spec))
            mapped = jax.shard_map(
                lambda table, ids: asked(functools.partial(gathered_rows, table), ids),
                mesh=mesh,
                in_specs=(spec, of_ids),
                out_specs=of_ids,
                check_vma=False,
            )
            return mapped(table, ids)

        def late(now, ids):
            def rows_of(slots):
                merge = now.merged(at, slots, None)
                return gathered_rows(now.caught_up(at, merge).param, merge.places)

            return asked(rows_of, ids)

        shards = TableShards(self._snapshot, {at: NamedSharding(mesh, spec)})
        return shards.run(late, (ids,), (of_ids,), of_ids)

    def _check_shards(self, path, ids):
        """Returns the mesh axes that shard the rows; raises if it cannot be read."""
        table, of_ids = self._leaves[path], jax.typeof(ids).sharding.spec
        by_rows, *others = jax.typeof(table).sharding.spec
        mesh = jax.typeof(table).sharding.mesh
        # An axis of size 1 shards nothing, whatever it is named for.
        if any(ranks_of(mesh, part or ()) > 1 for part in others):
            spec = PartitionSpec(by_rows, *others)
            raise ArgumentError(
                f"lazy: read= under jit: {path!r} is sharded {spec}, and each row must be "
                "whole on one device: shard the table by rows, P('fsdp', None), or "
                "replicate it."
            )
        asking = {name for part in of_ids for name in axis_names(part or ())}
        for name in axis_names(by_rows or ()):
            if mesh.shape[name] > 1 and name not in asking:
                raise AxisError(
                    f"lazy: read= under jit: the rows of {path!r} are sharded over "
                    f"{name!r}, and the ids by which it is read are not: each device must "
                    "ask for rows of its own. Shard the ids over all axes of the batch."
                )
        return by_rows

    def listed(self, path: str, lookups: list[Lookup], grads: RowGrads) -> RowGrads:
        """Returns the gradient of a table, with its `ReadRows` if it has one lookup."""
        del path
        first, *more = lookups
        if more or first.reading is None:
            return grads
        return ReadRowGrads.of(grads, first.reading, self._by)

    def reading(self, grads: RowGrads) -> ReadRows | None:
        """Returns the `ReadRows` of a gradient, if this reader has read its rows."""
        if not isinstance(grads, ReadRowGrads) or grads.by is not self._by:
            return None
        return grads.reading

    def check_of(self, state: LazyState) -> None:
        """Reports under checkify if the state that is updated is of another step."""
        checkify.debug_check(
            self._snapshot.step == state.step,
            "lazy: read must be a reader of the state that is updated, and this one is of "
            "another step. Take lazy_tx.reader(params, state) anew in each step.",
        )

    @property
    def sums(self) -> Mapping[int, FadingSums]:
        """The sums by which rows catch up to this step, which an update uses again."""
        return self._snapshot.missed.sums

    def whole(self, paths: Sequence[str]) -> list[jax.Array]:
        """Returns the whole parameters at some paths, with all rows caught up."""
        wanted = [self._numbers.get(path) for path in paths]
        moving = self._snapshot.plan.moving
        late = [at for at in wanted if at in moving]
        settled = every_row(self._snapshot, late, Snapshot.replayed)
        return [
            self._leaf(path) if at is None or at not in settled else settled[at].param
            for path, at in zip(paths, wanted, strict=True)
        ]

    def _leaf(self, path):
        """Returns the parameter at a path; raises if the reader has none there."""
        if path not in self._leaves:
            raise ArgumentError(
                f"lazy: read= has no parameter {path!r}, which the loss is given, but "
                f"{', '.join(map(repr, self._leaves))}: make it of the parameters of the "
                "loss, lazy_tx.reader(params, state)."
            )
        return self._leaves[path]


def reader_of(optimizer: RowOptimizer, read: Any) -> LateRowReader | None:
    """Returns the `read` argument of an update; None if it is of another optimizer.

    The latter happens where `optax.inject_hyperparams` makes an optimizer at each step.
    """
    if read is None or isinstance(read, LateRowReader):
        return read if read is not None and read.optimizer is optimizer else None
    raise ArgumentError(
        "lazy: read must be what reads the rows of this step, lazy_tx.reader(params, "
        f"state), or left out, got a {type(read).__name__}."
    )


def _check_axes():
    """Raises if XLA may shard a table from which each rank reads rows independently."""
    further = further_axes()
    if further:
        raise AxisError(
            "lazy: each rank catches up the rows that it reads, in loops of its own "
            f"length, and {further[0]!r} is no manual axis here (axis_names of "
            "jax.shard_map leaves it out): where XLA shards a table over it, ranks would "
            "wait for one another. Make all axes manual, by leaving axis_names out, or "
            "take exact=False."
        )
