"""Tables that are sharded by rows, under `jit`: each device has the rows of its shard.

Steps and reads work on shards as if they were tables of that height, inside one `shard_map`
over all axes of the mesh. They send nothing: a device updates the rows that it holds, of
the parameter and of the optimizer's state. If rows catch up in loops, each device takes as
many turns as its own rows need.

Other parameters and their state are zeros inside, and are not computed.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sparsejax.axes import axis_names, mesh_of, unsharded
from sparsejax.errors import ArgumentError
from sparsejax.rows.updates.call import Rows
from sparsejax.rows.updates.snapshot import Snapshot
from sparsejax.state.tree import is_masked


@dataclasses.dataclass(frozen=True)
class TableShards:
    """The shards of some tables of a snapshot.

    Attributes:
        now: The snapshot of whole tables.
        shardings: The sharding of each table by its number: along its rows, or replicated.
    """

    now: Snapshot
    shardings: Mapping[int, NamedSharding]

    def run(
        self,
        function: Callable[..., Any],
        operands: Any,
        in_specs: Any,
        out_specs: Any,
    ) -> Any:
        """Calls a function inside `shard_map` with a snapshot of this device's shards.

        Args:
            function: A function of a `Snapshot` and the operands.
            operands: A tuple of pytrees of arrays.
            in_specs: The PartitionSpecs of the operands.
            out_specs: The PartitionSpecs of the result.

        Raises:
            ArgumentError: The optimizer closes over arrays on the mesh.
        """
        now = self.now
        if now.plan.layout.closes_over:
            path = now.plan.layout.paths[min(self.shardings)]
            raise ArgumentError(
                f"lazy: {path!r} is sharded by rows, and the optimizer was made of values "
                "that are traced on Explicit axes, as optax.inject_hyperparams around lazy "
                "has them: JAX hands no such value to a shard_map. Put "
                "optax.inject_hyperparams inside, lazy(optax.inject_hyperparams(optax.adam)"
                "(0.1)), or replicate the table."
            )
        tables = {at: self._typed(at, now.all_of(at)) for at in self.shardings}
        alone = [
            unsharded(x)
            for x, owner in zip(now.inner, now.plan.layout.owner, strict=True)
            if owner is None
        ]
        # Replicated on all devices: leaves without rows, and the sums of `Fading`.
        common = now.state._replace(last=(), inner=alone), now.missed.sums
        mapped = jax.shard_map(
            lambda tables, common, operands: function(
                self._snapshot(tables, *common), *operands
            ),
            mesh=next(iter(self.shardings.values())).mesh,
            in_specs=({at: self.specs(at) for at in tables}, PartitionSpec(), in_specs),
            out_specs=out_specs,
            check_vma=False,
        )
        return mapped(tables, common, operands)

    def specs(self, at: int) -> Rows:
        """Returns the PartitionSpecs of all rows of a table."""
        spec = PartitionSpec(self.shardings[at].spec[0])
        return jax.tree.map(lambda _: spec, self.now.all_of(at))

    def _typed(self, at, rows):
        """Types all rows of a table, which axes of size 1 may shard otherwise."""
        by_rows = PartitionSpec(self.shardings[at].spec[0])
        there = NamedSharding(self.shardings[at].mesh, by_rows)
        return jax.tree.map(lambda x: typed_as(x, there), rows)

    def _snapshot(self, tables, common, sums):
        """Makes the snapshot of this device's shards."""
        now = self.now
        params = [
            tables[at].param if at in tables else jnp.zeros(x.shape, x.dtype)
            for at, x in enumerate(now.shapes)
        ]
        alone, inner = iter(common.inner), []
        for x, owner in zip(now.inner, now.plan.layout.owner, strict=True):
            inner.append(next(alone) if owner is None else jnp.zeros(x.shape, x.dtype))
        for at, rows in tables.items():
            for j, own in zip(now.plan.layout.tables[at].own, rows.own, strict=True):
                inner[j] = own
        zeros = lambda x: x if is_masked(x) else jnp.zeros(x.shape, x.dtype)
        last = [
            tables[at].last if at in tables else zeros(x) for at, x in enumerate(now.last)
        ]
        tree = now.structure.unflatten(params)
        state = common._replace(
            last=now.structure.unflatten(last),
            inner=jax.tree.unflatten(now.of_state, inner),
        )
        return Snapshot(now.optimizer, tree, tree, state, sums)


def typed_as(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns an array with a sharding that differs from its own in axes of size 1."""
    own = jax.typeof(x).sharding
    kinds = dict(zip(own.mesh.axis_names, own.mesh.axis_types, strict=True))
    names_in = lambda parts: [axis_names(part or ()) for part in parts]
    parts = names_in([*sharding.spec, *[None] * (x.ndim - len(sharding.spec))])
    # Types show Explicit axes only.
    shown = [tuple(n for n in part if kinds[n] is AxisType.Explicit) for part in parts]
    if shown == names_in(own.spec):
        return x
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*shown)))


def every_row(
    now: Snapshot,
    tables: Iterable[int],
    catch_up: Callable[[Snapshot, Iterable[int]], dict[int, Rows]],
) -> dict[int, Rows]:
    """Returns all rows of some tables, caught up; devices catch up their own shards.

    Args:
        now: The snapshot.
        tables: The numbers of the tables.
        catch_up: The method: `Snapshot.settled`, or `Snapshot.replayed`.
    """
    found = {at: _sharding(now.leaves[at]) for at in tables}
    sharded = {at: x for at, x in found.items() if x is not None}
    # If rows are sharded along their own axes too, the types of an explicit mesh allow
    # only steps one by one. Gradients of such tables are dense, so rows are rarely late.
    cut = [at for at in found if at not in sharded and _is_cut(now.leaves[at])]
    made = Snapshot.replayed(now, cut)
    made |= catch_up(now, [at for at in found if at not in sharded and at not in cut])
    if sharded:
        shards = TableShards(now, sharded)
        specs = {at: shards.specs(at) for at in sharded}
        made |= shards.run(lambda now: catch_up(now, specs), (), (), specs)
    return made


def _sharding(table):
    """Returns the sharding of a table by rows, if its type under `jit` has one; or None."""
    mesh = mesh_of(table)
    if mesh is None or mesh.manual_axes or AxisType.Explicit not in mesh.axis_types:
        return None
    by_rows, *others = jax.typeof(table).sharding.spec
    if by_rows is None or any(others):
        return None
    return NamedSharding(mesh, PartitionSpec(by_rows))


def _is_cut(table):
    """Returns whether a table is sharded along its rows and along another axis, too."""
    spec = jax.typeof(table).sharding.spec
    return spec[0] is not None and any(spec[1:])
