"""Handles steps that `sparsejax.skip_nonfinite` has skipped, for a trainer.

Counts in the optimizer's state show whether a step was skipped. Variables are kept if that
wrapper is outermost. Nothing is sent.
"""

from typing import Any

import numpy as np

from sparsejax import branches
from sparsejax.errors import BadNumberError
from sparsejax.state import tree
from sparsejax.state.finite import Found
from sparsejax.state.per_rank import find
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


class Reports:
    """Raises for steps that were skipped with `report=True`, once each.

    A wrapper inside another, such as `sparsejax.accumulate`, is not run at every step, so
    its number of updates is compared with that before the step.
    """

    def __init__(self):
        self._updates = []

    def before(self, state: TrainState) -> None:
        """Reads a state that is not that of the last step."""
        self._updates = _updates(find(state.opt_state, Found))

    def after(self, state: TrainState) -> None:
        """Raises if an update was skipped in the step that returned a state.

        It waits for that step, if the state has a record of bad numbers, and reads a few
        numbers that are equal on all processes.
        """
        if not self._updates:
            return  # there is no record, and a search of every state would take time
        found = find(state.opt_state, Found)
        before, self._updates = self._updates, _updates(found)
        for one, old, new in zip(found, before, self._updates, strict=True):
            if new > old and int(np.asarray(tree.here(one.last))[0]) == new - 1:
                error = BadNumberError(one.message())
                error.state = state
                raise error


def _updates(found):
    return [int(np.asarray(tree.here(one.step))) for one in found]
