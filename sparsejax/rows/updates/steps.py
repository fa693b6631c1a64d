"""What a lazy optimizer does: its first state, a step, and catching all rows up."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax.rows.updates import anatomy as anatomies
from sparsejax.rows.updates.catch_up import Rows, added, history
from sparsejax.rows.updates.inside import Inside
from sparsejax.rows.updates.state import LazyState, find
from sparsejax.rows.updates.view import View
from sparsejax.units.row_grads import RowGrads, is_row_grads


def init(inside: Inside, params: Any) -> LazyState:
    """The first state; raises if the optimizer can update no table by rows."""
    anatomy = inside.anatomy(params, params)
    tables = anatomy.tables.values()
    refused = [table for table in tables if inside.why_not(table)]
    if refused and len(refused) == len(tables):
        inside.check(refused[0])
    inner = inside.tx.init(params)
    _, leaves, structure = anatomies.flatten(params)
    lagging = inside.lagging(anatomy)
    last = [
        jnp.zeros(leaf.shape[0], jnp.int32) if at in lagging else optax.MaskedNode()
        for at, leaf in enumerate(leaves)
    ]
    numbers = jax.tree.leaves(inner)
    return LazyState(
        step=jnp.zeros((), jnp.int32),
        last=jax.tree.unflatten(structure, last),
        history=history([numbers[j] for j in anatomy.held] if lagging else []),
        inner=inner,
    )


def tables(inside: Inside, params: Any) -> list[str]:
    """The paths of the parameters that it can update by rows."""
    tables = inside.anatomy(params, params).tables.values()
    return [table.path for table in tables if not inside.why_not(table)]


def update(
    inside: Inside, updates: Any, state: Any, params: Any = None, **extra: Any
) -> tuple[Any, LazyState]:
    """A step: rows catch up, the optimizer updates them, and they go back."""
    paths, grads, structure = anatomies.flatten(updates)
    view = View(inside, updates, params, find(state))
    listed = {}
    for at, (path, leaf) in enumerate(zip(paths, grads, strict=True)):
        if not is_row_grads(leaf):
            continue
        leaf.check(f"lazy: the update of {path!r}")
        if at in view.anatomy.tables:
            inside.check(view.anatomy.tables[at])
            listed[at] = leaf.merged()
        else:  # there is nothing in it
            grads[at] = leaf.to_dense()
    before = {at: view.gathered(at, leaf.ids) for at, leaf in listed.items()}
    # A table whose gradient is dense this time: all its rows are listed.
    others = {at: view.all_of(at) for at in view.lagging if at not in listed}
    late = {at: rows for at, rows in before.items() if at in view.lagging}
    now = {**before, **view.catch_up(late), **view.catch_up(others, one_by_one=True)}
    before |= others

    step = view.step + 1
    kept, inner = list(view.leaves), view.inner_with(now)
    for at, rows in now.items():
        kept[at] = rows.param
        grads[at] = listed[at].rows if at in listed else grads[at]
    made, inner = inside.tx.update(
        jax.tree.unflatten(structure, grads),
        jax.tree.unflatten(view.of_state, inner),
        None if params is None else jax.tree.unflatten(structure, kept),
        **extra,
    )
    made, inner, last = structure.flatten_up_to(made), jax.tree.leaves(inner), view.last
    for at in view.moving & now.keys():
        made[at] = _whole_move(made[at], before[at], now[at])
    for at in others:
        last[at] = jnp.full_like(last[at], step)
    for at, leaf in listed.items():
        put = _Scatter(leaf.ids, leaf.shape[0])
        for j in view.anatomy.tables[at].own:
            inner[j] = put(view.inner[j], inner[j])
        if at in view.lagging:
            seen = _after(before[at].last, made[at])
            last[at] = put(last[at], jnp.maximum(step, seen))
        made[at] = RowGrads(leaf.ids, made[at], leaf.shape)
    return jax.tree.unflatten(structure, made), LazyState(
        step=step,
        last=jax.tree.unflatten(structure, last),
        history=view.history,
        inner=jax.tree.unflatten(view.of_state, inner),
    )


def settled(inside: Inside, params: Any, state: Any) -> tuple[Any, Any]:
    """Parameters and state with all rows caught up."""
    ours = find(state)
    view = View(inside, params, params, ours)
    _, leaves, structure = anatomies.flatten(params)
    now = view.catch_up({at: view.all_of(at) for at in view.lagging})
    for at, rows in now.items():
        leaves[at], view.last[at] = rows.param, rows.last
    new = ours._replace(
        last=jax.tree.unflatten(structure, view.last),
        inner=jax.tree.unflatten(view.of_state, view.inner_with(now)),
    )
    is_ours = lambda node: isinstance(node, LazyState)
    state = jax.tree.map(lambda x: new if is_ours(x) else x, state, is_leaf=is_ours)
    return jax.tree.unflatten(structure, leaves), state


class _Scatter:
    """Writes rows to their places.

    Args:
        ids: int32 [n], distinct and ascending, but for those behind the last row.
        height: How many rows there are.
    """

    def __init__(self, ids: jax.Array, height: int):
        n = ids.shape[0]
        self.distinct = height + n < 2**31
        if self.distinct:
            ids = jnp.where(ids < height, ids, height + jnp.arange(n, dtype=jnp.int32))
        self.ids = ids

    def __call__(self, whole: jax.Array, rows: jax.Array) -> jax.Array:
        """The array with these rows."""
        return whole.at[self.ids].set(
            rows.astype(whole.dtype),
            mode="drop",
            indices_are_sorted=True,
            unique_indices=self.distinct,
        )


def _whole_move(made: jax.Array, before: Rows, after: Rows) -> jax.Array:
    """From what the last step changes to what all steps change that a row has missed."""
    moved = before.param != after.param
    # Of what has missed none it is the optimizer's own number.
    then = added(after.param, made)
    return jnp.where(moved, then - before.param, made).astype(made.dtype)


def _after(x, rows):
    """An array of integers, for XLA one that depends on rows too.

    The update of rows depends on all that the step has read of the state, in the loss too.
    What is written later than that overwrites the old array; else XLA would copy it first.
    """
    flag = jnp.signbit(rows.reshape(rows.shape[0], -1)[:, 0]).astype(x.dtype)
    return x + jnp.minimum(flag, 0)
