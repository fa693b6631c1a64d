"""The first half of a step, for an optimizer that has two: it applies what is carried."""

from collections.abc import Callable
from typing import Any

import optax

from sparsejax import rows
from sparsejax.embrace.horizontal import Begun, Horizontal, HorizontalState, find_order
from sparsejax.embrace.vertical import flushing
from sparsejax.state import observing
from sparsejax.training.train_state import TrainState


def has_two(tx: optax.GradientTransformation) -> bool:
    """Whether a step of an optimizer begins with what the last one has left."""
    return isinstance(tx, Horizontal)


def begun(
    tx: optax.GradientTransformation,
    params: Any,
    opt_state: Any,
    loss_fn: Callable[..., Any],
) -> tuple[Any, Any]:
    """The parameters and the state after the first half of a step; inside `shard_map`.

    Args:
        tx: The optimizer.
        params: The parameters.
        opt_state: Its state.
        loss_fn: From parameters to the loss, which is traced where the order of blocks is
            to be found in it.
    """
    if not isinstance(tx, Horizontal):
        return params, opt_state
    order = None
    if tx.schedule.order is None and isinstance(opt_state, HorizontalState):
        order = find_order(loss_fn, params, at_once=tx.schedule.at_once)
    return tx.begin(params, opt_state, order)


def settled(tx: optax.GradientTransformation, state: TrainState) -> TrainState:
    """A state in which nothing waits, and no row is late; inside `shard_map`.

    Args:
        tx: The optimizer.
        state: The state.
    """
    seen = observing.observed(tx, state.params)
    lazy = [part.part for part in seen.rows if isinstance(part.part, rows.Lazy)]

    def of_rows(params, opt_state):
        if not lazy:
            return params, opt_state  # there is no table
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
    """The part of a state that is about leaves which are not carried: all, as a rule."""
    return opt_state.rest if isinstance(opt_state, Begun | HorizontalState) else opt_state
