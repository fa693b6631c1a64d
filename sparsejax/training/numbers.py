"""What a trainer does about numbers that are not finite: its argument `bad_numbers`.

On the wire is what `transforms.bad_numbers` sends, one word of each rank. That wrapper is
outermost here, so the count in the optimizer's state tells whether a step was left out.
"""

from typing import Any

import numpy as np
import optax

from sparsejax import axes, errors
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError, BadNumberError
from sparsejax.training.on_rank import halves
from sparsejax.training.train_state import TrainState
from sparsejax.transforms.state import tree
from sparsejax.transforms.state.alike.numbers import POLICIES, check_numbers
from sparsejax.transforms.wrappers import SkipState, bad_numbers


def guarded(
    tx: optax.GradientTransformation, policy: str, axis_name: AxisName
) -> optax.GradientTransformation:
    """The optimizer with a policy around it; raises where it cannot have one.

    Args:
        tx: The optimizer.
        policy: The argument `bad_numbers` of the trainer.
        axis_name: The axis of the ranks.
    """
    errors.check_one_of("bad_numbers", policy, POLICIES)
    if policy == "pass":
        return tx
    if halves.has_two(tx):
        raise ArgumentError(
            f"data_parallel(bad_numbers={policy!r}) leaves steps out by all gradients at "
            "once, and sparsejax.embrace.horizontal sends some of them after others have "
            'been applied: take bad_numbers="pass", or the chain without horizontal.'
        )
    return bad_numbers(tx, policy, axis_name)


def kept(before: Any, after: Any, old: Any, new: Any) -> Any:
    """The next variables: the last ones where the step was left out.

    Args:
        before: The optimizer's state before the step.
        after: That behind it.
        old: The variables before the step.
        new: Those behind it.
    """
    if not isinstance(after, SkipState):
        return new
    is_left_out = after.skipped > before.skipped
    return axes.cond(is_left_out, lambda: old, lambda: new)


def check(state: TrainState) -> None:
    """Raises where the step that returned a state was left out, and is to be told.

    It waits for that step, if the state can tell, and reads a few numbers that are the same
    on all processes.
    """
    own = state.opt_state
    if not isinstance(own, SkipState) or own.found is None:
        return
    try:
        check_numbers(own, since=int(np.asarray(tree.here(own.found.step))) - 1)
    except BadNumberError as error:
        error.state = state
        raise
