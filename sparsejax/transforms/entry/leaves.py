"""Gradients outside of `shard_map`, and the part of them that each device has inside.

UnreducedLeaf   an array that is unreduced over the axes of the batch
EntriesLeaf     entries that a sparsifier selected, one device's after another's
StackedLeaf     a `PerReplica`: what each replica has, stacked over the ranks' axis
RowsLeaf        `RowGrads`, of which each device has those of its part of the batch
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sparsejax.axes import AxisName, axis_names
from sparsejax.state import tree
from sparsejax.state.parameters import ranks_of
from sparsejax.state.per_replica import PerReplica
from sparsejax.transforms.entry.shards import ShardSum
from sparsejax.units.row_grads import RowGrads, ShardedRowGrads, is_row_grads
from sparsejax.wire.collectives import Wire


class LeafPlaces(NamedTuple):
    """What an entered update needs of its leaves that types do not contain.

    Attributes:
        scatter: The dimension of each leaf of whose sum a rank needs one piece; None if it
            needs all.
        axes: The mesh axes but the ranks' over which devices have other parts of each leaf.
        inside: Bytes that were sent for each leaf over the axes that are not the ranks'.
    """

    scatter: tuple[int | None, ...]
    axes: tuple[tuple[str, ...], ...]
    inside: tuple[float, ...]

    def cut(self, leaves: Sequence[int]) -> list[tuple[int, int]]:
        """Those of some leaves that are cut into pieces, each with its dimension."""
        found = ((i, self.scatter[i]) for i in leaves)
        return [(i, at) for i, at in found if at is not None]


@dataclasses.dataclass(frozen=True, eq=False)
class OuterLeaf(abc.ABC):
    """A gradient outside.

    Attributes:
        value: The gradient.
        sum: How its sum is sharded.
        mesh: The mesh.
        sums: Whether the update sums gradients; else it hands them on.
    """

    value: Any
    sum: ShardSum
    mesh: Mesh | AbstractMesh
    sums: bool

    @property
    def given(self) -> Any:
        """The value, in the place that `in_spec` says."""
        return self.value

    @property
    @abc.abstractmethod
    def in_spec(self) -> Any:
        """The PartitionSpecs of the value."""

    @abc.abstractmethod
    def enter(self, value: Any) -> tuple[Any, float]:
        """What this device has of it, inside, and the bytes sent for it."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of what this device has."""

    def summed(self, x: Any) -> Any:
        """What is handed out of `shard_map` of a sum.

        Rows stay rows where a device has whole ones: of a replicated table all devices list
        the same, and of a table that is sharded by rows each those of its shard. Of one
        that is sharded by columns they become the gradient of the shard.
        """
        if not is_row_grads(x):
            return x
        by_rows, *others = (*self.sum.parts, ())
        if any(others):
            return self._of_columns(x).to_dense()
        if not by_rows:
            return x.bare
        height = x.shape[0] * ranks_of(self.mesh, by_rows)
        sharding = NamedSharding(self.mesh, PartitionSpec(by_rows))
        return ShardedRowGrads.of_shard(x, (height, *x.shape[1:]), sharding)

    def _of_columns(self, x):
        """Rows cut to this rank's columns, where it needs no others."""
        if self.sum.scatter is None:
            return x
        parts = [None] * self.sum.scatter + [self.sum.ranks]
        return of_shard(x.ids, x.rows, x.shape, ShardSum(PartitionSpec(*parts), ()))

    def sum_spec(self, x: Any) -> Any:
        """The PartitionSpecs of what `summed` returns."""
        if isinstance(x, ShardedRowGrads):
            return x.specs
        if is_row_grads(x):
            return dataclasses.replace(x, ids=PartitionSpec(), rows=PartitionSpec())
        return self.sum.spec

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which devices have other parts of it, but the ranks'."""
        return self.sum.axes

    def leave(self, x: Any) -> Any:
        """What is handed out of `shard_map` for what is not summed yet."""
        return x

    def out_spec(self, x: Any) -> Any:
        """The PartitionSpecs of what `leave` returns."""
        if tree.is_sparse(x):
            return along(x, self.mesh.axis_names)
        # JAX 0.10 to 0.12 lower no unreduced result of a `shard_map` over one device.
        return self._partial if self.mesh.size > 1 else PartitionSpec(*self.sum.own)

    def handed_on(self, x: Any) -> Any:
        """What `leave` returned, outside: still unreduced on a mesh of one device, too."""
        if self.mesh.size > 1 or not isinstance(x, jax.Array):
            return x
        return jax.reshard(x, NamedSharding(self.mesh, self._partial))

    @property
    def _partial(self):
        """Sharded as its sum, and still unreduced over the ranks."""
        return PartitionSpec(*self.sum.own, unreduced=frozenset(self.sum.ranks))


class UnreducedLeaf(OuterLeaf):
    """An array that is unreduced, over the axes of the ranks at least."""

    @property
    def in_spec(self):
        """Its sharding once no axis of the sum shards it, and still unreduced."""
        unreduced = frozenset(self.sum.ranks) | self.sum.fast
        return PartitionSpec(*self.sum.given, unreduced=unreduced)

    @property
    def given(self) -> jax.Array:
        """The array, sharded as `in_spec` says."""
        return jax.reshard(self.value, NamedSharding(self.mesh, self.in_spec))

    @property
    def shape(self):
        """The shape of a shard."""
        return shard_shape(self.value.shape, self.sum, self.mesh)

    def enter(self, value):
        """Its shard, summed over the fast axes."""
        return self.sum(value)


class EntriesLeaf(OuterLeaf):
    """Entries that differ by device."""

    @property
    def in_spec(self):
        """One device's after another's."""
        return along(self.value, self.mesh.axis_names)

    @property
    def shape(self):
        """The shape of the shard whose entries they are."""
        return self.value.shape

    def enter(self, value):
        """This device's."""
        return value, 0.0


class StackedLeaf(OuterLeaf):
    """What each replica has."""

    @property
    def node(self) -> PerReplica:
        """The node."""
        return self.value

    @property
    def in_spec(self):
        """Sharded over the replicas, and after that as the parameter."""
        return self._specs(self.node.value)

    @property
    def axes(self):
        """As of all, but rows are returned as those of the whole table."""
        is_whole = is_row_grads(self.node.value) and not self.sums
        return () if is_whole else self.sum.axes

    @property
    def shape(self):
        """The shape of a shard."""
        value = self.node.value
        if tree.is_sparse(value):
            return value.shape
        whole = value.shape if is_row_grads(value) else value.shape[1:]
        return shard_shape(whole, self.sum, self.mesh)

    def enter(self, value):
        """This replica's shard."""
        inner = value.value
        if is_row_grads(inner):
            own = inner.ids[0], inner.rows[0], inner.shape
            return (of_shard(*own, self.sum) if self.sums else RowGrads.marked(*own)), 0.0
        return (inner if tree.is_sparse(inner) else inner[0]), 0.0

    def leave(self, x):
        """Stacked again."""
        value = x if tree.is_sparse(x) else jax.tree.map(lambda y: y[None], tree.bare(x))
        return dataclasses.replace(self.node, value=value)

    def out_spec(self, x):
        """As `in_spec`."""
        return self._specs(x)

    def _specs(self, value):
        if tree.is_sparse(value):
            specs = along(value, self.mesh.axis_names)
        elif is_row_grads(value):
            specs = along(value, self.node.axis_name)
        else:
            specs = PartitionSpec(self.node.axis_name, *self.sum.own)
        return dataclasses.replace(self.node, value=specs)


class RowsLeaf(OuterLeaf):
    """Rows of a table: each device has those that its part of the batch has read."""

    @property
    def over(self) -> tuple[str, ...]:
        """The mesh axes over which the batch is sharded."""
        (part,) = jax.typeof(self.value.ids).sharding.spec
        return axis_names(part or ())

    @property
    def fast(self) -> tuple[str, ...]:
        """Those of the batch's axes that are not the ranks'."""
        return tuple(name for name in self.over if name not in self.sum.ranks)

    @property
    def axes(self):
        """Those of the table's shards, and of the batch before its rows are gathered."""
        return self.sum.axes if self.sums else self.fast

    @property
    def in_spec(self):
        """One device's rows after another's."""
        return self.out_spec(self.value)

    @property
    def shape(self):
        """The shape of the table's shard."""
        return shard_shape(self.value.shape, self.sum, self.mesh)

    def enter(self, value):
        """The rows of this device's shard that any device of this rank has read.

        Transformations that pass them on leave them unchanged.
        """
        if not self.sums:
            return RowGrads.marked(value.ids, value.rows, value.shape), 0.0
        ids, rows, sent = value.ids, value.rows, 0.0
        if self.fast:
            wire = Wire(self.fast)
            (ids, of_ids), (rows, of_rows) = wire.all_gather(ids), wire.all_gather(rows)
            ids, rows = ids.reshape(-1), rows.reshape(-1, *value.shape[1:])
            sent = of_ids + of_rows
        return of_shard(ids, rows, value.shape, self.sum), sent

    def leave(self, x):
        """One device's rows after another's, known again by their ids."""
        return x.bare

    def out_spec(self, x):
        """As `in_spec`."""
        return along(x, self.over)


def of_shard(
    ids: jax.Array, rows: jax.Array, shape: tuple[int, ...], of: ShardSum
) -> RowGrads:
    """The rows of this device's shard of a table, inside `shard_map`.

    Args:
        ids: Rows of the table.
        rows: Their gradients.
        shape: The shape of the table.
        of: How it is sharded.
    """
    local = list(shape)
    for at, part in enumerate(of.own):
        if not part:
            continue
        wire = Wire(part)
        local[at] //= wire.ranks
        start = wire.rank * local[at]
        if at == 0:
            mine = (ids >= start) & (ids < start + local[0])
            ids = jnp.where(mine, ids - start, local[0])
        else:
            rows = jax.lax.dynamic_slice_in_dim(rows, start, local[at], at)
    return RowGrads.marked(ids, rows, tuple(local))


def along(leaf: Any, names: AxisName) -> Any:
    """The specs of arrays that differ by device along some axes, one's after another's."""
    return jax.tree.map(lambda _: PartitionSpec(names), leaf)


def shard_shape(
    shape: tuple[int, ...], of: ShardSum, mesh: Mesh | AbstractMesh
) -> tuple[int, ...]:
    """The shape of what is exchanged of an array of this shape."""
    return NamedSharding(mesh, PartitionSpec(*of.own)).shard_shape(tuple(shape))


def whole_shape(
    shape: tuple[int, ...], of: ShardSum, mesh: Mesh | AbstractMesh
) -> tuple[int, ...]:
    """The shape of an array of which a shard has this shape; inverse of `shard_shape`."""
    sizes = [ranks_of(mesh, part or ()) for part in of.own]
    sizes += [1] * (len(shape) - len(sizes))
    return tuple(x * size for x, size in zip(shape, sizes, strict=True))
