"""The first half of a step, for an optimizer that has two: it applies what is carried."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from sparsejax.embrace.horizontal import Begun, Horizontal, HorizontalState, find_order
from sparsejax.errors import ArgumentError


def has_two(tx: optax.GradientTransformation) -> bool:
    """Whether a step of an optimizer begins with what the last one has left."""
    return isinstance(tx, Horizontal)


def begun(
    tx: optax.GradientTransformation,
    params: Any,
    opt_state: Any,
    loss_fn: Callable[..., Any],
) -> tuple[Any, Any]:
    """The parameters and the state behind the first half of a step; inside `shard_map`.

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


def flusher(
    tx: optax.GradientTransformation, mesh: Mesh, specs: Any, donate: bool
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """From parameters and state to those with nothing carried, jitted.

    Args:
        tx: The optimizer.
        mesh: The mesh.
        specs: The PartitionSpecs of a `TrainState`.
        donate: Whether it uses up what it is given.
    """
    if not isinstance(tx, Horizontal):
        raise ArgumentError(
            "trainer.flush is for an optimizer that carries gradients into the next step, "
            f"as sparsejax.embrace.horizontal makes it; nothing is carried by {tx!r}."
        )
    both = (specs.params, specs.opt_state)
    flush = jax.shard_map(tx.flush, mesh=mesh, in_specs=both, out_specs=both)
    return jax.jit(flush, donate_argnums=(0, 1) if donate else ())


def applied(
    tx: optax.GradientTransformation, params: Any, opt_state: Any
) -> tuple[Any, Any]:
    """The parameters that are to be evaluated, and the state of those not carried."""
    if not isinstance(tx, Horizontal) or opt_state is None:
        return params, opt_state
    params, opt_state = tx.flush(params, opt_state)
    return params, opt_state.rest


def of_rest(opt_state: Any) -> Any:
    """The part of a state that is about leaves which are not carried: all, as a rule."""
    return opt_state.rest if isinstance(opt_state, Begun) else opt_state
