"""Determines the kind of each gradient of an update under `jit`, or raises."""

import dataclasses
import itertools
import math
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sparsejax.axes import axis_names, mesh_of
from sparsejax.errors import AlreadySummedError, ArgumentError
from sparsejax.state import sharded, tree
from sparsejax.state.parameters import ranks_of
from sparsejax.state.per_replica import is_per_replica
from sparsejax.transforms.entry.leaves import (
    EntriesLeaf,
    OuterLeaf,
    RowsLeaf,
    StackedLeaf,
    UnreducedLeaf,
)
from sparsejax.transforms.entry.shards import ShardSum
from sparsejax.units.row_grads import is_row_grads


@dataclasses.dataclass(frozen=True)
class Incoming:
    """The properties that all leaves of an entered update share.

    Attributes:
        name: The name of the public function.
        names: The axes of the ranks.
        mesh: The mesh.
        sums: Whether the update sums gradients.
    """

    name: str
    names: tuple[str, ...]
    mesh: Mesh | AbstractMesh
    sums: bool

    def leaf(self, path: str, leaf: Any, param: Any) -> OuterLeaf:
        """Returns the `OuterLeaf` of a gradient; `param` is its parameter, or None."""
        call = f"update of {self.name} under jit"
        if sharded.is_sharded(leaf):
            raise ArgumentError(
                f"{call}: the gradient of {path!r} is a {type(leaf).__name__}, a table by "
                "columns, which is not taken there. Call update inside jax.shard_map."
            )
        if is_per_replica(leaf):
            self._check_spec(call, path, leaf)
            found = StackedLeaf(leaf, ShardSum(leaf.spec, self.names), self.mesh, self.sums)
            self._check_stacked(call, path, leaf.value)
            check_sum(found.sum, call, path)
            return found
        if param is not None and mesh_of(param) is not None:
            if jax.typeof(param).sharding.spec.reduced:
                raise ArgumentError(
                    f"{call} was given what sparsejax.local returned for {path!r}: give it "
                    "the parameters themselves, tx.update(grads, opt_state, params)."
                )
        of_param = None if param is None else spec_of(param)
        if tree.is_sparse(leaf):
            if self.sums and of_param is None:
                raise ArgumentError(self._needs_params(path))
            of = ShardSum(of_param or PartitionSpec(), self.names)
            check_sum(of, call, path)
            return EntriesLeaf(leaf, of, self.mesh, self.sums)
        if is_row_grads(leaf):
            return self._rows(call, path, leaf, of_param)
        spec = jax.typeof(leaf).sharding.spec
        unreduced = frozenset(spec.unreduced)
        if missing := sorted({*self.names} - unreduced):
            if param is not None and mesh_of(param) is None:
                raise AlreadySummedError(
                    f"{call}: the gradient of {path!r} is summed already: the parameter is "
                    "on no mesh, as a NumPy array is, and sparsejax.local left it as it "
                    "was. Place it before: params = jax.device_put(params, jax.P())."
                )
            raise AlreadySummedError(
                f"{call}: the gradient of {path!r} is not unreduced over {missing[0]!r}, "
                "so it is summed already, and nothing would be saved. Either jax.grad did "
                "it: differentiate with respect to sparsejax.local(params, axes), with all "
                "mesh axes over which the batch is sharded. Or you did, with jax.reshard "
                "or another synchronization in this chain: let one synchronization do it. "
                "Or another part of the chain, as skip_nonfinite, was given another axis: "
                "name the same in all."
            )
        fast = unreduced - {*self.names}
        if of_param is None and fast:
            raise ArgumentError(self._needs_params(path))
        if of_param is None:
            of_param = PartitionSpec(*spec.partitions)
        of = ShardSum(of_param, self.names, fast)
        check_sum(of, call, path)
        return UnreducedLeaf(leaf, of, self.mesh, self.sums)

    def _rows(self, call, path, leaf, of_param):
        """Returns the `RowsLeaf` of a gradient by rows."""
        leaf.check(path)
        if of_param is None:
            raise ArgumentError(self._needs_params(path))
        found = RowsLeaf(leaf, ShardSum(of_param, self.names), self.mesh, self.sums)
        if missing := [name for name in self.names if name not in found.over]:
            raise AlreadySummedError(
                f"{call}: the rows of {path!r} are not sharded over {missing[0]!r}, so all "
                "ranks list the same. Read the table by ids that are sharded over all axes "
                "of the batch, and take the gradient with sparsejax.value_and_grad."
            )
        check_sum(found.sum, call, path)
        return found

    def _check_spec(self, call, path, leaf):
        """Raises unless the spec of a stacked gradient shards its parameter evenly."""
        value = leaf.value
        rows = is_row_grads(value) or tree.is_sparse(value)
        shape = value.shape if rows else value.shape[1:]
        for size, part in itertools.zip_longest(shape, leaf.spec):
            names = axis_names(part or ())
            shards = math.prod(self.mesh.shape.get(name, 0) for name in names)
            if not shards or size is None or (size % shards and not tree.is_sparse(value)):
                raise ArgumentError(
                    f"{call}: the gradient of {path!r} is stacked with spec={leaf.spec}, "
                    f"which does not shard the shape {list(shape)} of its parameter evenly "
                    f"on a mesh of {dict(self.mesh.shape)}: give the parameter's own spec, "
                    "param_specs of sparsejax.per_replica."
                )

    def _check_stacked(self, call, path, value):
        """Raises unless the leading axis has one gradient for each replica."""
        if tree.is_sparse(value):
            return
        count = ranks_of(self.mesh, self.names)
        shape = tree.numbers(value).shape
        if shape[:1] != (count,):
            raise ArgumentError(
                f"{call}: the gradient of {path!r} has the shape {list(shape)}, and "
                f"{count} replicas stacked have {count} first: give "
                "sparsejax.transforms.PerReplica one array of all of them."
            )

    def _needs_params(self, path):
        return (
            f"update of {self.name} under jit: how the gradient of {path!r} is to be "
            "sharded is known from its parameter. Give update the parameters: "
            "tx.update(grads, opt_state, params)."
        )


def check_sum(of: ShardSum, call: str, path: str) -> None:
    """Raises if the sum of a gradient cannot be sharded like its parameter."""
    if of.wrong:
        raise ArgumentError(f"{call}: {path!r} cannot be given its sum: {of.wrong}")


def spec_of(x: Any) -> PartitionSpec:
    """Returns the spec of an array, from its sharding or its type; `P()` on no mesh."""
    if not isinstance(x, Tracer) and isinstance(x, jax.Array):
        found = x.sharding
        is_named = isinstance(found, NamedSharding)
        return PartitionSpec(*found.spec.partitions) if is_named else PartitionSpec()
    if mesh_of(x) is None:
        return PartitionSpec()
    return PartitionSpec(*jax.typeof(x).sharding.spec.partitions)
