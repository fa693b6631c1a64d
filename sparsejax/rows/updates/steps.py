"""The init and update of a lazy optimizer, and catching up all rows.

A step (`update`) merges the ids that a gradient lists with those that are due; gathers
these rows of the parameter and of the state; applies the steps that they have missed, one
by one or as a sum (`catch_up`); calls the optimizer with them in place of the table
(`RowCall`); and scatters them back. If a table is sharded by rows, each device does so with
the rows of its shard (`shards`).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.platforms import policy
from sparsejax.axes import mesh_of, unsharded
from sparsejax.errors import ArgumentError, warn_of_platform
from sparsejax.rows import tiles
from sparsejax.rows.updates import layout as layouts
from sparsejax.rows.updates.call import Rows
from sparsejax.rows.updates.catch_up.fading import first_kept
from sparsejax.rows.updates.catch_up.history import history
from sparsejax.rows.updates.optimizer import RowOptimizer
from sparsejax.rows.updates.optimizer_step import (
    OptimizerStep,
    listed,
    same_but_over,
    taken,
)
from sparsejax.rows.updates.reader import LateRowReader, reader_of
from sparsejax.rows.updates.shards import TableShards, every_row
from sparsejax.rows.updates.snapshot import Snapshot, before
from sparsejax.rows.updates.state import LazyState, find
from sparsejax.state import tree
from sparsejax.units.indices import Origin
from sparsejax.units.row_grads import (
    LateRowGrads,
    RowGrads,
    ShardedRowGrads,
    is_row_grads,
)


def init(optimizer: RowOptimizer, params: Any) -> LazyState:
    """Returns the first state; raises if the optimizer can update no table by rows."""
    plan = optimizer.started(params)
    tables = plan.layout.tables.values()
    refused = [table for table in tables if optimizer.why_not(table)]
    if refused and len(refused) == len(tables):
        optimizer.check(refused[0])
    _, leaves, structure = layouts.flatten(params)
    numbers, of_inner = jax.tree.flatten(optimizer.tx.init(params))
    numbers = [
        x if owner is None else _sharded_like_rows(leaves[owner], x)
        for x, owner in zip(numbers, plan.layout.owner, strict=True)
    ]
    lagging = plan.lagging
    last = [
        _first_steps(leaf) if at in lagging else optax.MaskedNode()
        for at, leaf in enumerate(leaves)
    ]
    return LazyState(
        step=jnp.zeros((), jnp.int32),
        last=jax.tree.unflatten(structure, last),
        history=history([numbers[j] for j in plan.layout.held] if lagging else []),
        inner=jax.tree.unflatten(of_inner, numbers),
        kept=tuple(first_kept(way) for _, way in plan.fading.values()),
    )


def _first_steps(table):
    """Returns the first `LazyState.last` of a table, sharded like its rows."""
    return _sharded_like_rows(table, jnp.zeros(table.shape[0], jnp.int32))


def _sharded_like_rows(table, x):
    """Shards the first axis of an array [height, ...] like the rows of a table."""
    mesh, over = mesh_of(table), jax.typeof(table).sharding.spec[0]
    of_rows, *others = jax.typeof(x).sharding.spec
    if mesh is None or over == of_rows:
        return x
    return jax.reshard(x, NamedSharding(mesh, PartitionSpec(over, *others)))


def tables(optimizer: RowOptimizer, params: Any) -> list[str]:
    """Returns the paths of the parameters that an optimizer can update by rows."""
    tables = optimizer.started(params).layout.tables.values()
    return [table.path for table in tables if not optimizer.why_not(table)]


def update(
    optimizer: RowOptimizer,
    updates: Any,
    state: Any,
    params: Any = None,
    *,
    read: LateRowReader | None = None,
    **extra: Any,
) -> tuple[Any, LazyState]:
    """Takes a step: rows catch up, the optimizer updates them, and they are scattered back.

    If gradients have delayed rows of the step before (`LateRowGrads`), these are updated
    first, as of that step.
    """
    read = reader_of(optimizer, read)
    paths, grads, structure = layouts.flatten(updates)
    state = find(state)
    is_late = lambda leaf: isinstance(leaf, LateRowGrads)
    early = {at: leaf.late for at, leaf in enumerate(grads) if is_late(leaf)}
    grads = [leaf.now if is_late(leaf) else leaf for leaf in grads]
    updates, moved = jax.tree.unflatten(structure, grads), {}
    if early:
        moved, state = _late(optimizer, early, updates, state, params)
    _check_shapes(paths, grads, structure, params)
    if read is not None:
        read.check_of(state)
    now = Snapshot(optimizer, updates, params, state, read and read.sums)
    lists, by_shard = {}, {}
    for at, (path, leaf) in enumerate(zip(paths, grads, strict=True)):
        if not is_row_grads(leaf):
            continue
        leaf.check(f"lazy: the update of {path!r}")
        if at in now.plan.layout.tables:
            optimizer.check(now.plan.layout.tables[at])
            _warn_of_narrow(path, leaf)
            if isinstance(leaf, ShardedRowGrads):
                by_shard[at] = leaf
                continue
            # If a step comes in two halves, rows that are due are listed with the late
            # half, which may contain some of them.
            reading = None if read is None or at in early else read.reading(leaf)
            due = None if reading or at in early else now.due(at)
            lists[at] = listed(now, at, leaf, due, reading)
        else:  # a table without elements
            grads[at] = leaf.to_dense()
    step = OptimizerStep(now, grads, extra)
    made, inner, last = taken(step, lists, by_shard=by_shard)
    if by_shard:
        found = _by_shard(now, by_shard, extra)
        for at, (update, rows) in found.items():
            made[at], last[at] = update, rows.last
            for j, own in zip(now.plan.layout.tables[at].own, rows.own, strict=True):
                inner[j] = own
    for at, late in moved.items():
        made[at] = _concatenated(late, made[at])
    return jax.tree.unflatten(structure, made), LazyState(
        step=now.step + 1,
        last=jax.tree.unflatten(structure, last),
        history=now.history,
        inner=jax.tree.unflatten(now.of_state, inner),
        kept=now.kept(),
    )


def _check_shapes(paths, grads, structure, params):
    """Raises if rows are those of a table of another shape than the parameter's."""
    leaves = [] if params is None else structure.flatten_up_to(params)
    for path, grad, param in zip(paths, grads, leaves, strict=False):
        if is_row_grads(grad) and grad.shape != jnp.shape(param):
            raise ArgumentError(
                f"lazy: the update of {path!r} has rows of a table of shape "
                f"{list(grad.shape)}, and the parameter has shape "
                f"{list(jnp.shape(param))}: give it the parameters whose gradients these "
                "are."
            )


def _warn_of_narrow(path, leaf):
    """Warns if rows are narrower than those to which the platform pads them."""
    width, least = math.prod(leaf.shape[1:]), policy().row
    if width < least:
        warn_of_platform(
            "narrow rows",
            f"lazy updates {path!r} {list(leaf.shape)} by rows, and a TPU pads rows to "
            f"{least} numbers where they are read and written: each step copies the whole "
            f"table, and those of the optimizer, into rows of {least}, and back. Pad the "
            f"width of the table to {least}, or a multiple of it, or leave sparsejax.lazy "
            "out, which updates it densely.",
        )


def _by_shard(
    now: Snapshot,
    grads: Mapping[int, ShardedRowGrads],
    extra: Mapping[str, Any],
) -> dict[int, tuple[ShardedRowGrads, Rows]]:
    """Takes the step of tables that are sharded by rows.

    Returns:
        By table, its update, and all its `Rows` after the step, without the parameter.
    """
    shards = TableShards(now, {at: x.sharding for at, x in grads.items()})
    arrays, rest = tree.arrays_and_others(extra)
    arrays = jax.tree.map(unsharded, arrays)

    def step_of(now, given, arrays):
        local = {at: leaf.on_shard() for at, leaf in given.items()}
        every = [jnp.zeros(x.shape, x.dtype) for x in now.shapes]
        every = [local.get(at, zeros) for at, zeros in enumerate(every)]
        step = OptimizerStep(now, every, rest | arrays)
        lists = {at: listed(now, at, leaf, now.due(at)) for at, leaf in local.items()}
        made, inner, last = taken(step, lists, others=False)
        found = {}
        for at, leaf in given.items():
            own = tuple(inner[j] for j in now.plan.layout.tables[at].own)
            update = ShardedRowGrads.of_shard(made[at], leaf.shape, leaf.sharding)
            found[at] = update, Rows((), own, last[at])
        return found

    specs = {at: leaf.specs for at, leaf in grads.items()}
    kept = {at: shards.specs(at)._replace(param=()) for at in grads}
    out = {at: (specs[at], kept[at]) for at in grads}
    made = shards.run(step_of, (grads, arrays), (specs, PartitionSpec()), out)
    again = lambda x: dataclasses.replace(x, origin=Origin(x.ids))
    return {at: (again(update), rows) for at, (update, rows) in made.items()}


@tree.promoting()
def caught_late(
    optimizer: RowOptimizer, late: Any, state: Any, params: Any
) -> tuple[Any, LazyState]:
    """Applies delayed rows of the last step, without a new step.

    Args:
        optimizer: The optimizer.
        late: A tree like the parameters: `RowGrads`, or `optax.MaskedNode` for a parameter
            without delayed rows.
        state: The state.
        params: The parameters.

    Returns:
        A tree like `late` with the updates, and the state.
    """
    ours = find(state)
    paths, rows, whole = layouts.flatten(late)
    by_path = dict(zip(paths, rows, strict=True))
    params = optimizer.params_of(params, ours)
    paths, leaves, structure = layouts.flatten(params)
    early = {at: by_path[path] for at, path in enumerate(paths) if path in by_path}
    zeros = jax.tree.unflatten(structure, list(map(jnp.zeros_like, leaves)))
    moved, ours = _late(optimizer, early, zeros, ours, params)
    return whole.unflatten([moved[paths.index(path)] for path in by_path]), ours


def _late(optimizer, late, updates, state, params):
    """Updates rows that the last step has left out, as that step would have done.

    Numbers of steps in the state, and hyperparameters that are set by hand, have the values
    of that step. Only the rows of its result are kept: all else was updated then.

    Returns:
        The updates, by table, and the state.
    """
    paths, leaves, structure = layouts.flatten(updates)
    plan = optimizer.plan(updates, params)
    then = Snapshot(optimizer, updates, params, before(plan, state))
    lists, grads = {}, [jnp.zeros(x.shape, x.dtype) for x in leaves]
    for at, leaf in late.items():
        leaf.check(f"lazy: the late rows of {paths[at]!r}")
        if at not in plan.layout.tables:
            continue
        optimizer.check(plan.layout.tables[at])
        optimizer.check_late(plan, at)
        lists[at] = listed(then, at, leaf, then.due(at, unseen=True))
        grads[at] = leaf
    step = OptimizerStep(then, grads, {})
    made, rows, last = taken(step, lists, others=False)
    inner = jax.tree.leaves(state.inner)
    for at in lists:
        for j in plan.layout.tables[at].own:
            inner[j] = rows[j]
    return {at: made[at] for at in lists}, state._replace(
        last=jax.tree.unflatten(structure, last),
        inner=jax.tree.unflatten(then.of_state, inner),
    )


def _concatenated(late: RowGrads, now: RowGrads) -> RowGrads:
    """Concatenates the updates of two steps, whose lists have no row in common."""
    ids = jnp.concatenate([late.ids, now.ids])
    return RowGrads.marked(ids, jnp.concatenate([late.rows, now.rows]), now.shape)


@tree.promoting()
def settled(optimizer: RowOptimizer, params: Any, state: Any) -> tuple[Any, Any]:
    """Returns the parameters and the state with all rows caught up."""
    ours = find(state)
    names, whole, of_whole = layouts.flatten(params)
    params = optimizer.params_of(params, ours)
    paths, leaves, structure = layouts.flatten(params)
    tables = optimizer.plan(params, params).layout.tables
    last = structure.flatten_up_to(ours.last)
    inner, of_state = jax.tree.flatten(ours.inner)
    for at, rows in _caught_up(optimizer, params, ours).items():
        leaves[at], last[at] = rows.param, rows.last
        for j, own in zip(tables[at].own, rows.own, strict=True):
            inner[j] = own
    new = ours._replace(
        last=jax.tree.unflatten(structure, last), inner=jax.tree.unflatten(of_state, inner)
    )
    is_ours = lambda node: isinstance(node, LazyState)
    state = jax.tree.map(lambda x: new if is_ours(x) else x, state, is_leaf=is_ours)
    settled = dict(zip(names, whole, strict=True)) | dict(zip(paths, leaves, strict=True))
    return jax.tree.unflatten(of_whole, [settled[name] for name in names]), state


@functools.partial(jax.jit, static_argnums=0)
def _caught_up(optimizer, params, state):
    """Returns all rows of the tables whose rows may be late, caught up, in one program.

    Without `jit` each operation would be compiled separately, and none fused.
    """
    now = Snapshot(optimizer, params, params, state)
    settled = every_row(now, now.plan.lagging, Snapshot.settled)
    of = {at: tiles.axes_of(now.last[at], now.step) for at in settled}
    return {
        at: rows._replace(last=same_but_over(of[at], rows.last))
        for at, rows in settled.items()
    }
