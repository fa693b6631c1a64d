"""Takes a step with shorter lists of rows, or with the unchanged ones if they do not fit.

A gradient by rows lists every id that the batch reads, with repeats, and all buffers
downstream (messages, sums, updates) have the capacity for as many rows from each rank.
Where ids repeat, as those of clicks and words do, most of that is padding. With a capacity
the rows are first merged into a list of that length, if those of every rank fit; if not,
the step is taken with the lists unchanged. Both are compiled, and one of them runs: no row
is left out.

On the wire: one pmax of a number, the most rows by which a list exceeds its capacity.
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
"""How many rows of a table a rank usually lists in a step; see `within_capacity`."""


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
            step: one number for all tables, or a mapping from regular expressions, which
            are searched in the paths, to numbers; the first match counts. Lists that are
            not longer than this, and those of tables without a match, are unchanged.
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
    # Loops of one turn or none instead of a cond, where XLA copies arrays that a branch
    # writes in place.
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
    """Returns a capacity as a mapping from patterns to numbers; raises if it is invalid.

    Args:
        capacity: A number, or a mapping from regular expressions, which are searched in
            the paths, to numbers.
        name: The name of the argument, for the message.

    Returns:
        The mapping from regular expressions to numbers.

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
    """Returns the capacities of the lists to shorten, by the numbers of the leaves."""
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
    """Returns the maximum of some numbers over all ranks, equal on all of them."""
    names = axes.manual_axes() if axis_name is None else axes.axis_names(axis_name)
    numbers = as_varying(numbers, frozenset().union(*map(varying_axes, numbers)))
    most = jnp.max(jnp.stack(numbers))
    return Wire(names).maximum(most)[0] if names else most


def _held(number: jax.Array, arrays: Any) -> Any:
    """Returns arrays unchanged, from a barrier that depends on the turn.

    Computations on them stay inside the loop. Otherwise XLA would hoist those on the longer
    lists out of it, and run them in every step.
    """
    arrays, _ = lax.optimization_barrier((arrays, number))
    return arrays


def _own(grads: RowGrads) -> RowGrads:
    return RowGrads.marked(grads.ids, grads.rows, grads.shape)


def _short(grads: RowGrads, merge: Merge, room: int) -> RowGrads:
    """Merges rows into a list of length `room`, which must be enough for them."""
    merge = merge._replace(ids=merge.ids[:room])
    return RowGrads.marked(merge.ids, merge.sums(grads.rows), grads.shape)


def _typed_as(old, new):
    """Casts the result of a turn to vary over the mesh axes of the carry."""
    return as_varying(new, varying_axes(old))
