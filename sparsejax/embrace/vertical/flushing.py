"""Sends and applies the rows that ranks hold back, before parameters are read or saved.

On the wire: an all_to_all of the delayed rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax.embrace.vertical import sending
from sparsejax.embrace.vertical.sync import EmbraceState
from sparsejax.errors import ArgumentError, StateError
from sparsejax.rows import Lazy, apply_updates, settle
from sparsejax.rows.updates import steps
from sparsejax.state import pending as held, sharded
from sparsejax.state.per_rank import find
from sparsejax.wire.collectives import Wire


def flush(params: Any, state: Any, tx: Lazy) -> tuple[Any, Any]:
    """Applies the rows that `embrace_sync` delays, and catches up all rows.

    It runs inside `jax.shard_map`; `trainer.flush(state)` calls it there. Training may
    continue from its result. It is not counted as a step.

    Args:
        params: The parameters.
        state: The state of the chain that contains `embrace_sync` and `tx`.
        tx: The lazy optimizer of that chain, from `sparsejax.lazy`.

    Returns:
        The parameters, as they would be without delays, and the state that belongs to them.

    Example:
        >>> rows = sparsejax.lazy(optax.adam(1e-3))
        >>> tx = optax.chain(sparsejax.embrace_sync(), rows)
        >>> specs = sparsejax.state_specs((params, state))
        >>> params, state = jax.jit(jax.shard_map(
        ...     lambda params, state: sparsejax.embrace.flush(params, state, rows),
        ...     mesh=mesh, in_specs=specs, out_specs=specs,
        ... ))(params, state)

    See Also:
        `sparsejax.rows.settle`: catches up all rows where none is delayed.
    """
    if not isinstance(tx, Lazy):
        raise ArgumentError(
            f"flush: tx must be what sparsejax.lazy has returned, got a "
            f"{type(tx).__name__}. Keep it when you chain it: rows = "
            "sparsejax.lazy(optax.adam(1e-3)); tx = optax.chain(sparsejax.embrace_sync(), "
            "rows)."
        )
    found = find(state, EmbraceState)
    if len(found) != 1:
        raise StateError(
            "flush: there must be one state of embrace_sync(vertical=True) in the state "
            f"that is given, and there are {len(found)}: give it what init or update of "
            "the whole chain has returned."
        )
    late, emptied = _sent(params, found[0])
    updates, rows = steps.caught_late(tx.inside, late, state, params)
    params = apply_updates(params, updates)
    new = {EmbraceState: found[0]._replace(pending=emptied), type(rows): rows}
    ours = lambda node: type(node) in new
    replaced = lambda node: new[type(node)] if ours(node) else node
    state = jax.tree.map(replaced, state, is_leaf=ours)
    return settle(params, state, tx, flushed=True)


def _sent(params, state):
    """Sends delayed rows; returns gradients of columns, and `Pending` without rows."""
    shards = sharded.apart(params)
    pairs = dict(zip(shards.paths, shards.nodes, strict=True))
    paths = list(state.pending)
    if not paths:
        return jax.tree.map(lambda _: optax.MaskedNode(), params), {}
    missing = [path for path in paths if path not in pairs]
    if missing:
        raise StateError(
            f"flush: the state holds back rows of the table {missing[0]!r}, which is not "
            f"among the parameters' {sorted(pairs)}: give it those that are trained."
        )
    wire = Wire.over(pairs[paths[0]].axis_name, "sparsejax.embrace.flush")
    own = [state.pending[path] for path in paths]
    for path, x in zip(paths, own, strict=True):
        height, columns = pairs[path].value.shape
        x.check(path, wire.ranks, (height, columns * wire.ranks))
    received, _ = sending.columns_of(wire, [x.rows.value[0] for x in own])
    late, emptied = {}, {}
    mean = state.tables.inner.reduction.mean
    for path, x, rows in zip(paths, own, received, strict=True):
        rows = wire.mean_of(rows, mean)
        late[path] = held.row_grads(x.ids, rows, x.height)
        zeros = x.rows.with_value(jnp.zeros_like(x.rows.value))
        ids = jnp.full_like(x.ids, x.height)
        emptied[path] = dataclasses.replace(x, ids=ids, rows=zeros)
    nodes = [
        dataclasses.replace(node, value=late.get(path, optax.MaskedNode()))
        for path, node in pairs.items()
    ]
    rest = jax.tree.map(lambda _: optax.MaskedNode(), shards.rest)
    return shards.together(rest, nodes), emptied


def rows_held(state: Any) -> dict[str, jax.Array]:
    """Returns the number of rows of each table that each rank delays.

    Args:
        state: The state of a chain with `embrace_sync(vertical=True)`, inside or outside of
            `shard_map`.

    Returns:
        A dict from paths of tables to int32 [ranks].

    Example:
        >>> users = sparsejax.ColumnTable.create(jax.random.key(0), 100, 8, mesh)
        >>> tx = optax.chain(sparsejax.embrace_sync(), sparsejax.lazy(optax.adam(1e-3)))
        >>> opt_state = sparsejax.init(tx, {"users": users}, mesh)
        >>> sparsejax.embrace.rows_held(opt_state)["users"].tolist()
        [0, 0, 0, 0]
    """
    return {
        path: jnp.sum(own.ids < own.height, axis=1, dtype=jnp.int32)
        for each in find(state, EmbraceState)
        for path, own in each.pending.items()
    }
