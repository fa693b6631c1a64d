"""Shorter lists of rows for what follows a gradient, and the fallback where they are full.

A batch has a list of all the ids that it reads, and all that comes after, messages, sums
and their updates, has room for as many rows from each rank. Where ids repeat, as those of
clicks and words do, most of that is empty. With a capacity the rows are merged into a list
of that length first, if those of every rank fit; if not, the step is taken with the lists
unchanged. Both are compiled, and one of them runs: no row is left out.

On the wire: one pmax of a number, by how many rows the fullest list is over its capacity.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import arguments, axes
from sparsejax.axes import AxisName, as_varying, varying_axes
from sparsejax.errors import ArgumentError, RuleError
from sparsejax.state import tree
from sparsejax.units.merging import Merge, merged
from sparsejax.units.row_grads import RowGrads, is_row_grads
from sparsejax.wire.collectives import Wire


Capacity = int | Mapping[str, int]


def within_capacity(
    step: Callable[..., Any],
    grads: Any,
    *carry: Any,
    capacity: Capacity,
    axis_name: AxisName | None = None,
) -> Any:
    """Takes a step with shorter lists of rows, if the rows of every rank fit into them.

    The step is compiled twice, with the long lists and with the short ones, and memory is
    reserved for the long ones. A step with short lists takes less time. Arrays that the
    step returns in place of its arguments are updated in place, as in a direct call.

    Args:
        step: A function from gradients and the carry to the carry, of the same shapes and
            dtypes. It may send.
        grads: Gradients, with `RowGrads` among them.
        *carry: The carry: the parameters, and the optimizer's state.
        capacity: The number of distinct rows of a table that a rank usually lists in a
            step: one number for all tables, or numbers by regular expressions searched in
            the paths, of which the first that matches counts. Lists that are not longer,
            and those of tables that none matches, are unchanged.
        axis_name: The mesh axis of the ranks; all manual ones if None.

    Returns:
        The carry that the step returns; if it is a single value, that value.

    Example:
        >>> def update(grads, params, state):
        ...     updates, state = tx.update(grads, state, params)
        ...     return sparsejax.apply_updates(params, updates), state
        >>> params, state = sparsejax.rows.within_capacity(
        ...     update, grads, params, state, capacity=40_000
        ... )
    """
    paths, leaves, structure = tree.flatten(grads, "within_capacity", rows=True)
    rooms = _rooms(paths, leaves, capacity)
    call = lambda leaves, carry: step(structure.unflatten(leaves), *carry)
    if not rooms:
        return call(leaves, carry)
    leaves = tree.bare(leaves)
    merges = {at: merged(leaves[at].ids, leaves[at].shape[0]) for at in rooms}
    over = [merges[at].found - room for at, room in rooms.items()]
    fits = _most(over, axis_name) <= 0
    single = len(carry) == 1
    # Loops of one turn or of none: XLA copies what a branch writes in place.
    times = fits.astype(jnp.int32)

    def turn(shorter):
        def body(number, carry):
            kept, found = _held(number, (leaves, merges))
            given = list(kept)
            for at, leaf in enumerate(kept):
                if is_row_grads(leaf):
                    short = shorter and at in rooms
                    given[at] = _short(leaf, found[at], rooms[at]) if short else _own(leaf)
            after = call(given, carry)
            return jax.tree.map(_typed_as, carry, (after,) if single else tuple(after))

        return body

    carry = lax.fori_loop(0, times, turn(True), carry)
    carry = lax.fori_loop(0, 1 - times, turn(False), carry)
    return carry[0] if single else carry


def check_capacity(capacity: Any, name: str = "capacity") -> Mapping[str, int]:
    """Returns a capacity by patterns of paths, and raises where it is none.

    Args:
        capacity: A number, or numbers by regular expressions searched in the paths.
        name: The argument, for the message.

    Returns:
        The numbers by regular expression.

    Example:
        >>> sparsejax.rows.check_capacity({"users": 60_000})
        {'users': 60000}
    """
    by_pattern = capacity if isinstance(capacity, Mapping) else {"": capacity}
    for pattern, room in by_pattern.items():
        arguments.check_regular(pattern)
        own = f"{name} of {pattern!r}" if pattern else name
        arguments.check_whole(own, room, 1)
    return by_pattern


def _rooms(paths, leaves, capacity):
    """The capacities for the rows of leaves, by their numbers."""
    by_pattern = check_capacity(capacity)
    tables = [at for at, leaf in enumerate(leaves) if is_row_grads(leaf)]
    listed = ", ".join(repr(paths[at]) for at in tables)
    if not tables:
        raise ArgumentError(
            "a capacity is one of lists of rows, and no gradient is RowGrads: take them "
            "with sparsejax.value_and_grad, or put sparsejax.lazy around the optimizer "
            "after a synchronization; or leave capacity out."
        )
    rooms, used = {}, set()
    for at in tables:
        leaves[at].check(f"the gradient of {paths[at]!r}")
        matching = [p for p in by_pattern if re.search(p, paths[at])]
        used |= {*matching}
        if matching and by_pattern[matching[0]] < leaves[at].capacity:
            rooms[at] = by_pattern[matching[0]]
    unused = [pattern for pattern in by_pattern if pattern not in used]
    if unused:
        raise RuleError(
            f"the capacity of {unused[0]!r} matches no leaf whose gradient is RowGrads. "
            f"Those are: {listed}. Patterns are regular expressions, searched in paths."
        )
    return rooms


def _most(numbers, axis_name):
    """The largest of some numbers on any rank, the same on all."""
    names = axes.manual_axes() if axis_name is None else axes.axis_names(axis_name)
    numbers = as_varying(numbers, frozenset().union(*map(varying_axes, numbers)))
    most = jnp.max(jnp.stack(numbers))
    return Wire(names).maximum(most)[0] if names else most


def _held(number: jax.Array, arrays: Any) -> Any:
    """Arrays that XLA takes for others in each turn.

    What depends on them stays inside the loop; else XLA would compute what it can of the
    longer lists in front of it, and at each step.
    """
    arrays, _ = lax.optimization_barrier((arrays, number))
    return arrays


def _own(grads: RowGrads) -> RowGrads:
    return RowGrads.marked(grads.ids, grads.rows, grads.shape)


def _short(grads: RowGrads, merge: Merge, room: int) -> RowGrads:
    """Rows merged into a list of that length; there must not be more."""
    merge = merge._replace(ids=merge.ids[:room])
    return RowGrads.marked(merge.ids, merge.sums(grads.rows), grads.shape)


def _typed_as(old, new):
    """The arrays that a turn returns, varying over the axes of those that it was given."""
    return as_varying(new, varying_axes(old))
