"""SparseLoCo: rounds whose differences are exchanged by few entries, in two bits."""

import numpy as np
import pytest

import sparsejax
from tests import helpers
from tests.chunked import reference
from tests.rounds import model
from tests.rounds.model import EVERY, RANKS


ROUNDS, LR, DECAY = 5, 0.7, 0.9


def anchors(optimizer, given, values, over):
    """The anchor after each round, in float64, and what ranks hold at the end."""
    anchor = model.first(np.float64)
    optimizers = [optimizer() for _ in range(RANKS)]
    moved, found, held = {name: [] for name in anchor}, [], {}
    for number in range(ROUNDS):
        steps = given[number * EVERY : (number + 1) * EVERY]
        differences = model.inner_round(anchor, optimizers, steps)
        for name, history in moved.items():
            history.append(np.stack([one[name] for one in differences]))
        grads = {name: np.stack(history, 1) for name, history in moved.items()}
        options = {"k": 64, "chunk": 4096, "values": values, "over": over, "decay": DECAY}
        weights = np.ones((RANKS, number + 1))
        totals, held = reference.rounds(grads, weights, **options)
        anchor = {name: x - LR * totals[name][-1] for name, x in anchor.items()}
        found.append(anchor)
    return found, {name: x[-1] for name, x in held.items()}


@pytest.mark.parametrize(
    ("values", "over"), [("2bit", "senders"), *helpers.slow(("float32", "ranks"))]
)
def test_five_rounds_are_those_of_the_formulas(values, over):
    given = model.batches(ROUNDS * EVERY)
    ours, theirs = model.INNER["sgd"]
    tx = sparsejax.rounds.sparse_loco(ours(), EVERY, LR, DECAY, values=values, over=over)
    run = model.train(tx, given)
    wanted, held = anchors(theirs, given, values, over)
    for number, anchor in enumerate(wanted):
        found = run.params[(number + 1) * EVERY - 1]
        for name, x in anchor.items():
            np.testing.assert_allclose(found[name][0], x, rtol=2e-5, atol=2e-5)
    residuals = sparsejax.residuals(run.state)
    for name, x in held.items():
        np.testing.assert_allclose(residuals[name], x, rtol=2e-4, atol=2e-5)
        assert np.abs(x).max() > 0
    # A round sends one message of the size of the formula to each other rank.
    metrics = sparsejax.metrics(run.state)
    shapes = list(model.SHAPES.values())
    message = sparsejax.chunked.message.message_bytes(shapes, values=values)
    assert int(metrics["sync/exchanges"]) == ROUNDS
    assert float(metrics["sync/total_wire_bytes"]) == ROUNDS * (RANKS - 1) * message
