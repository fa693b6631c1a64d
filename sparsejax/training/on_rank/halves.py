"""The first half of a step that has two: it applies the gradients that are carried."""

from collections.abc import Callable
from typing import Any

import optax

from sparsejax import rows
from sparsejax.embrace.horizontal import Begun, Horizontal, HorizontalState, find_order
from sparsejax.embrace.vertical import flushing
from sparsejax.state import observing
from sparsejax.training.train_state import TrainState


def has_two(tx: optax.GradientTransformation) -> bool:
    """Returns whether steps of an optimizer have two halves: `begin` and `update`."""
    return isinstance(tx, Horizontal)


def begun(
    tx: optax.GradientTransformation,
    params: Any,
    opt_state: Any,
    loss_fn: Callable[..., Any],
) -> tuple[Any, Any]:
    """Takes the first half of a step, if there are two; inside `shard_map`.

    Args:
        tx: The optimizer.
        params: The parameters.
        opt_state: The state of the optimizer.
        loss_fn: A function from parameters to the loss, which is traced to find the order
            of blocks if none is given.

    Returns:
        The parameters and the state.
    """
    if not isinstance(tx, Horizontal):
        return params, opt_state
    order = None
    if tx.schedule.order is None and isinstance(opt_state, HorizontalState):
        order = find_order(loss_fn, params, at_once=tx.schedule.at_once)
    return tx.begin(params, opt_state, order)


def settled(tx: optax.GradientTransformation, state: TrainState) -> TrainState:
    """Applies all updates that wait, and catches up all rows; inside `shard_map`.

    Args:
        tx: The optimizer.
        state: The state.
    """
    seen = observing.observed(tx, state.params)
    lazy = [part.part for part in seen.rows if isinstance(part.part, rows.Lazy)]

    def of_rows(params, opt_state):
        if not lazy:
            return params, opt_state  # no table is updated by rows
        if not seen.ahead:
            return rows.settle(params, opt_state, lazy[0])
        return flushing.flush(params, opt_state, lazy[0])

    params, opt_state = state.params, state.opt_state
    if isinstance(tx, Horizontal):
        params, opt_state = tx.flush(params, opt_state, of_rows)
    else:
        params, opt_state = of_rows(params, opt_state)
    return state._replace(params=params, opt_state=opt_state)


def of_rest(opt_state: Any) -> Any:
    """Returns the state of the leaves that are not carried: all, without `horizontal`."""
    return opt_state.rest if isinstance(opt_state, Begun | HorizontalState) else opt_state
