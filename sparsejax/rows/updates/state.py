"""The state of a lazy optimizer."""

from typing import Any, NamedTuple

import jax

from sparsejax.errors import StateError
from sparsejax.rows.updates.catch_up.history import History
from sparsejax.state import per_rank


class LazyState(NamedTuple):
    """State of `lazy`.

    Attributes:
        step: int32 [], the number of steps so far.
        last: A tree like the parameters: for each table whose rows catch up, int32
            [height], the last step that each row has seen; `optax.MaskedNode` for others.
        history: The last values of injected hyperparameters, and the first step of each.
        inner: The state of the optimizer; its rows are as after the last step they saw.
        kept: By `Fading.number`, the sums by which rows catch up whose momentum has faded:
            see `FadingSums`.
    """

    step: jax.Array
    last: Any
    history: History
    inner: Any
    kept: tuple[jax.Array, ...] = ()


def find(state: Any) -> LazyState:
    """Returns the state of `lazy` in that of a chain; raises unless there is just one."""
    found = per_rank.find(state, LazyState)
    if len(found) != 1:
        raise StateError(
            f"lazy: there must be one LazyState in the state that is given, and there are "
            f"{len(found)}. Give it what init or update of this transformation, or of the "
            "chain that it is in, has returned; and make one of several optimizers, "
            "lazy(optax.partition(...))."
        )
    return found[0]
