"""Conservation in error feedback: gradients equal updates plus what ranks hold back."""

from typing import Any

import numpy as np
import optax

from sparsejax.state.per_rank import find
from sparsejax.transforms.feedback import FeedbackState
from sparsejax.transforms.wrappers import AccumulateState
from tests.helpers.oracle import assert_within
from tests.helpers.runs import Run, assert_same_on_all_ranks


def held(state: Any, every: int = 1) -> dict[str, np.ndarray]:
    """Sums what the ranks of a `Run` hold back, by leaf, in float64.

    That is residuals and pending sums. `every` is the number of gradients whose mean the
    wrapped chain was given: residuals are multiplied by it.
    """
    trees = [(every, node.residual) for node in find(state, FeedbackState)]
    trees += [(1, node.pending) for node in find(state, AccumulateState)]
    total = {}
    for times, tree in trees:
        for name, x in ({} if tree is None else tree.value).items():
            if not isinstance(x, optax.MaskedNode):
                exact = np.asarray(x).astype(np.float64).sum((0, 1))
                total[name] = total.get(name, 0) + times * exact
    return total


def assert_conserved(grads: Any, run: Run, room: float = 1e-6) -> None:
    """Raises unless the gradients' sum equals that of updates and what ranks hold back.

    `room` is the tolerance, as a share of the sum of the gradients' magnitudes.
    """
    assert_same_on_all_ranks(run.updates)
    kept = held(run.state)
    for name, x in grads.items():
        exact = np.asarray(x).astype(np.float64)
        sent = np.asarray(run.updates[name][0]).astype(np.float64).sum(0)
        found, scale = sent + kept.get(name, 0), np.abs(exact).sum((0, 1))
        where = f"{name}, updates and what ranks hold"
        assert_within(found, exact.sum((0, 1)), room * scale + 1e-30, where)
        assert sent.any(), f"nothing of {name} was sent"
