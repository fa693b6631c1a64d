"""Handles steps that `sparsejax.skip_nonfinite` has skipped, for a trainer.

If that wrapper is outermost, the count in the optimizer's state shows whether a step was
skipped. Nothing is sent.
"""

from typing import Any

import numpy as np

from sparsejax import branches
from sparsejax.errors import BadNumberError
from sparsejax.state import tree
from sparsejax.state.finite import check_numbers
from sparsejax.training.train_state import TrainState
from sparsejax.transforms.wrappers import SkipState


def kept(before: Any, after: Any, old: Any, new: Any) -> Any:
    """Returns the next variables: the old ones if the step was skipped.

    Args:
        before: The optimizer's state before the step.
        after: The optimizer's state after the step.
        old: The variables before the step.
        new: The variables after the step.
    """
    if not isinstance(after, SkipState):
        return new
    is_left_out = after.skipped > before.skipped
    return branches.cond(is_left_out, lambda: old, lambda: new)


def check(state: TrainState) -> None:
    """Raises if the step that returned a state was skipped, with `report=True`.

    It waits for that step, if the state has the record of bad numbers, and reads a few
    numbers that are equal on all processes.
    """
    own = state.opt_state
    if not isinstance(own, SkipState) or own.found is None:
        return
    try:
        check_numbers(own, since=int(np.asarray(tree.here(own.found.step))) - 1)
    except BadNumberError as error:
        error.state = state
        raise
