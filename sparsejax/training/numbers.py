"""What a trainer does about steps that `sparsejax.skip_nonfinite` has left out.

Where that wrapper is outermost, the count in the optimizer's state shows which these are.
Nothing is sent for it.
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
    """The next variables: the last ones where the step was left out.

    Args:
        before: The optimizer's state before the step.
        after: That after it.
        old: The variables before the step.
        new: Those after it.
    """
    if not isinstance(after, SkipState):
        return new
    is_left_out = after.skipped > before.skipped
    return branches.cond(is_left_out, lambda: old, lambda: new)


def check(state: TrainState) -> None:
    """Raises where the step that returned a state was left out, and that is to be reported.

    It waits for that step, if the state has the count, and reads a few numbers that are the
    same on all processes.
    """
    own = state.opt_state
    if not isinstance(own, SkipState) or own.found is None:
        return
    try:
        check_numbers(own, since=int(np.asarray(tree.here(own.found.step))) - 1)
    except BadNumberError as error:
        error.state = state
        raise
