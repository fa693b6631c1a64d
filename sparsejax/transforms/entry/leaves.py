"""Gradients outside of `shard_map`, and the part of them that each device has inside.

UnreducedLeaf   an array that is unreduced over the axes of the batch
EntriesLeaf     entries that a sparsifier selected, concatenated over devices
StackedLeaf     a `PerReplica`: the gradients of all replicas, stacked over the ranks' axis
RowsLeaf        `RowGrads`: each device has the rows of its part of the batch
"""

import abc
import dataclasses
from typing import Any

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


@dataclasses.dataclass(frozen=True, eq=False)
class OuterLeaf(abc.ABC):
    """A gradient outside of `shard_map`.

    Attributes:
        value: The gradient.
        sum: The sharding of its sum.
        mesh: The mesh.
        sums: Whether the update sums gradients; if not, it returns them unsummed.
    """

    value: Any
    sum: ShardSum
    mesh: Mesh | AbstractMesh
    sums: bool

    @property
    def given(self) -> Any:
        """The value, sharded as `in_spec` says."""
        return self.value

    @property
    @abc.abstractmethod
    def in_spec(self) -> Any:
        """The PartitionSpecs of the value."""

    @abc.abstractmethod
    def enter(self, value: Any) -> tuple[Any, float]:
        """Returns this device's part, inside `shard_map`, and the bytes sent for it."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of this device's part."""

    def summed(self, x: Any) -> Any:
        """Returns the sum in the form in which it leaves `shard_map`.

        Rows stay rows if a device has whole ones: all devices list the same rows of a
        replicated table, and each lists those of its shard of a table that is sharded by
        rows. For a table that is sharded by columns they become the dense gradient of the
        shard.
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
        """Returns rows with the columns that this rank needs: its piece, or all.

        A rank that needs one piece of the rows has these rows alone already.
        """
        if not self.sum.scatter:
            return x
        parts = [None] * self.sum.scatter + [self.sum.ranks]
        return of_shard(x.ids, x.rows, x.shape, ShardSum(PartitionSpec(*parts), ()))

    def sum_spec(self, x: Any) -> Any:
        """Returns the PartitionSpecs of what `summed` returns."""
        if isinstance(x, ShardedRowGrads):
            return x.specs
        if is_row_grads(x):
            return dataclasses.replace(x, ids=PartitionSpec(), rows=PartitionSpec())
        return self.sum.spec

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which it is sharded inside, without the ranks'."""
        return self.sum.axes

    def leave(self, x: Any) -> Any:
        """Returns an unsummed leaf in the form in which it leaves `shard_map`."""
        return x

    def out_spec(self, x: Any) -> Any:
        """Returns the PartitionSpecs of what `leave` returns."""
        if tree.is_sparse(x):
            return along(x, self.mesh.axis_names)
        # JAX 0.10 to 0.12 cannot lower unreduced results of a `shard_map` on one device.
        return self._partial if self.mesh.size > 1 else PartitionSpec(*self.sum.own)

    def handed_on(self, x: Any) -> Any:
        """Makes what `leave` returned unreduced, outside, on a mesh of one device."""
        if self.mesh.size > 1 or not isinstance(x, jax.Array):
            return x
        return jax.reshard(x, NamedSharding(self.mesh, self._partial))

    @property
    def _partial(self):
        """The spec of what a rank exchanges, still unreduced over the ranks."""
        return PartitionSpec(*self.sum.own, unreduced=frozenset(self.sum.ranks))


class UnreducedLeaf(OuterLeaf):
    """An array that is unreduced over the axes of the ranks, and perhaps over others."""

    @property
    def in_spec(self):
        """Its unreduced spec, in which no axis of the sum shards it."""
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
        """Returns this device's shard, summed over the fast axes, and the bytes sent."""
        return self.sum(value)


class EntriesLeaf(OuterLeaf):
    """Entries that differ by device."""

    @property
    def in_spec(self):
        """The spec of entries that are concatenated over all devices."""
        return along(self.value, self.mesh.axis_names)

    @property
    def shape(self):
        """The shape of the shard to which the entries belong."""
        return self.value.shape

    def enter(self, value):
        """Returns this device's entries; nothing is sent."""
        return value, 0.0


class StackedLeaf(OuterLeaf):
    """The gradients of all replicas, stacked in a `PerReplica`."""

    @property
    def node(self) -> PerReplica:
        """The value, with its type."""
        return self.value

    @property
    def in_spec(self):
        """The spec with the replicas' axis first, then sharded like the parameter."""
        return self._specs(self.node.value)

    @property
    def axes(self):
        """The axes over which it is sharded; none for unsummed rows of a whole table."""
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
        """Returns this device's shard of its replica's gradient; nothing is sent."""
        inner = value.value
        if is_row_grads(inner):
            own = inner.ids[0], inner.rows[0], inner.shape
            return (of_shard(*own, self.sum) if self.sums else RowGrads.marked(*own)), 0.0
        return (inner if tree.is_sparse(inner) else inner[0]), 0.0

    def leave(self, x):
        """Returns the leaf as a `PerReplica` again."""
        value = x if tree.is_sparse(x) else jax.tree.map(lambda y: y[None], tree.bare(x))
        return dataclasses.replace(self.node, value=value)

    def out_spec(self, x):
        """Returns the specs of `leave`, which are those of `in_spec` for this value."""
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
    """Rows of a table; each device has the rows that its part of the batch has read."""

    @property
    def over(self) -> tuple[str, ...]:
        """The mesh axes over which the batch is sharded."""
        (part,) = jax.typeof(self.value.ids).sharding.spec
        return axis_names(part or ())

    @property
    def fast(self) -> tuple[str, ...]:
        """The axes of the batch that are not the ranks'."""
        return tuple(name for name in self.over if name not in self.sum.ranks)

    @property
    def axes(self):
        """The axes of the table's shards if summed; else those in `fast`."""
        return self.sum.axes if self.sums else self.fast

    @property
    def in_spec(self):
        """The spec of rows that are concatenated over the devices of the batch."""
        return self.out_spec(self.value)

    @property
    def shape(self):
        """The shape of the table's shard."""
        return shard_shape(self.value.shape, self.sum, self.mesh)

    def enter(self, value):
        """Returns the rows of this device's shard that any device of its rank has read.

        They are gathered over the fast axes. If the update does not sum gradients, these
        are the device's own rows, unchanged.
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
        """Returns the rows without what was computed to read them; see `RowGrads.bare`."""
        return x.bare

    def out_spec(self, x):
        """Returns the specs of rows that are concatenated over the batch's devices."""
        return along(x, self.over)


def of_shard(
    ids: jax.Array, rows: jax.Array, shape: tuple[int, ...], of: ShardSum
) -> RowGrads:
    """Returns the rows that are in this device's shard of a table, inside `shard_map`.

    Args:
        ids: Ids of rows of the whole table.
        rows: Their gradients.
        shape: The shape of the whole table.
        of: Its sharding.
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
    """Returns specs that shard the leading axis of each array of a leaf over `names`."""
    return jax.tree.map(lambda _: PartitionSpec(names), leaf)


def shard_shape(
    shape: tuple[int, ...], of: ShardSum, mesh: Mesh | AbstractMesh
) -> tuple[int, ...]:
    """Returns the shape of the shard of an array that a device exchanges."""
    return NamedSharding(mesh, PartitionSpec(*of.own)).shard_shape(tuple(shape))


def whole_shape(
    shape: tuple[int, ...], of: ShardSum, mesh: Mesh | AbstractMesh
) -> tuple[int, ...]:
    """Returns the shape of an array from that of its shard; inverts `shard_shape`."""
    sizes = [ranks_of(mesh, part or ()) for part in of.own]
    sizes += [1] * (len(shape) - len(sizes))
    return tuple(x * size for x, size in zip(shape, sizes, strict=True))
