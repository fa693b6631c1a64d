"""What a lazy optimizer keeps."""

from typing import Any, NamedTuple

import jax

from sparsejax.errors import StateError
from sparsejax.rows.updates.catch_up.history import History
from sparsejax.state import per_rank


class LazyState(NamedTuple):
    """State of `lazy`.

    Attributes:
        step: int32, how many steps there were.
        last: Like the parameters: of each table whose rows catch up, int32 [height], the
            step that each row has seen last. `optax.MaskedNode` for all others.
        history: The values of injected hyperparameters, and since when they have them.
        inner: The state of the optimizer; rows of it are as after their last step.
        kept: Sums by which rows move that were not seen for long, by `Fading.number`: see
            `FadingSums`.
    """

    step: jax.Array
    last: Any
    history: History
    inner: Any
    kept: tuple[jax.Array, ...] = ()


def find(state: Any) -> LazyState:
    """The state of `lazy` in that of a chain."""
    found = per_rank.find(state, LazyState)
    if len(found) != 1:
        raise StateError(
            f"lazy: there must be one LazyState in the state that is given, and there are "
            f"{len(found)}. Give it what init or update of this transformation, or of the "
            "chain that it is in, has returned; and make one of several optimizers, "
            "lazy(optax.partition(...))."
        )
    return found[0]
