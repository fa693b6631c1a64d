"""The state of local steps, and how it is found in the state of a chain."""

from typing import Any, NamedTuple

import jax

from sparsejax.errors import StateError
from sparsejax.state.per_rank import RankState, find


class LocalStepsState(NamedTuple):
    """State of `sparsejax.local_steps`.

    Attributes:
        step: int32: updates so far, the same on all ranks.
        offset: What each rank has moved since the last round, a tree like the parameters,
            float32 or wider: `RankState`, [ranks, ...].
        inner: The state of the inner optimizer of each rank: `RankState`.
        sync: The state of the synchronization.
        outer: The state of the outer optimizer, the same on all ranks.

    Example:
        >>> tx = sparsejax.local_steps(optax.adam(1e-3), every=30)
        >>> opt_state = sparsejax.init(tx, params, mesh)
        >>> opt_state.offset.value["w"].shape == (4, *params["w"].shape)
        True
    """

    step: jax.Array
    offset: RankState | None
    inner: RankState | None
    sync: Any
    outer: Any


def find_state(opt_state: Any, call: str) -> LocalStepsState | None:
    """The state of local steps in a tree; None where there is none.

    Args:
        opt_state: An optimizer's state, or any tree.
        call: Who asks, as the user knows it, for the message.
    """
    found = find(opt_state, LocalStepsState)
    if len(found) > 1:
        raise StateError(
            f"{call} found {len(found)} states of sparsejax.local_steps, and a rank has "
            "one offset from the anchor: give it the state of one of them. Parameters that "
            "are trained in two ways need one local_steps, with optax.partition as its "
            "inner optimizer."
        )
    return found[0] if found else None
