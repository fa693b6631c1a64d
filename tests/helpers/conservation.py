"""The law of error feedback: gradients come out as updates, or ranks hold them."""

from typing import Any

import numpy as np
import optax

from sparsejax.state.per_rank import find
from sparsejax.transforms.feedback import FeedbackState
from sparsejax.transforms.wrappers import AccumulateState
from tests.helpers.oracle import assert_within
from tests.helpers.runs import Run, assert_same_on_all_ranks


def held(state: Any, every: int = 1) -> dict[str, np.ndarray]:
    """What the ranks of a `Run` hold by leaf, in float64: residuals and pending sums.

    `every` is of how many gradients the chain inside was given the mean: so many times a
    residual counts.
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
    """Raises unless the sum of gradients is the sum of updates and what the ranks hold.

    `room` is the error allowed, as a share of the sum of the gradients' magnitudes.
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
