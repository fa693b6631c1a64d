"""PULSELoCo: rounds of which those differences go that a cast to bfloat16 shows."""

import jax.numpy as jnp
import numpy as np
import optax

import sparsejax
from tests import helpers
from tests.rounds import given
from tests.rounds.given import RANKS


ROUNDS, EVERY, LR, MOMENTUM = 5, 2, 0.7, 0.9
SHAPES = {"w": (256, 256), "b": (5,)}  # the second goes whole
SMALL = 2.0**-10  # of a parameter: about a third of moves show at once


def cast(x):
    return x.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)


def is_close(x):
    """Whether a cast depends on what float32 rounds away."""
    return cast(x * (1 + 1e-6)) != cast(x * (1 - 1e-6))


def run():
    params, grads = given.parameters(SHAPES), given.drawn(SHAPES, ROUNDS * EVERY)
    grads = {name: SMALL * x for name, x in grads.items()}
    tx = sparsejax.rounds.pulse_loco(optax.sgd(1.0), EVERY, LR, MOMENTUM)
    return params, grads, *given.trained(tx, params, grads)


def rounds(start, grads, is_gated):
    """In float64: anchors, residuals, shares sent, and what float32 may see otherwise."""
    anchor, velocity = start.astype(np.float64), 0.0
    left = np.zeros((RANKS, *start.shape))
    unsure, anchors, shares = np.zeros(start.shape, bool), [], []
    for number in range(ROUNDS):
        moved = grads[:, number * EVERY : (number + 1) * EVERY].astype(np.float64).sum(1)
        left = left + moved
        there = cast(anchor - LR * left) != cast(anchor) if is_gated else left == left
        unsure |= is_close(anchor) | is_close(anchor - LR * left).any(0)
        mean = np.where(there, left, 0).mean(0)
        left = np.where(there, 0, left)
        velocity = mean + MOMENTUM * velocity
        anchor = anchor - LR * (mean + MOMENTUM * velocity)
        anchors.append(anchor)
        shares.append(there.mean())
    return anchors, left, shares, unsure


def test_five_rounds_are_those_of_the_formulas():
    params, grads, found, state = run()
    helpers.assert_same_on_all_ranks(found)
    for name, start in params.items():
        anchors, left, shares, unsure = rounds(start, grads[name], name == "w")
        assert unsure.mean() < 0.02
        for number, anchor in enumerate(anchors):
            own = found[name][0, (number + 1) * EVERY - 1]
            wrong = ~np.isclose(own, anchor, rtol=2e-5, atol=1e-6) & ~unsure
            assert not wrong.any(), (
                f"the anchor of {name!r} after round {number}: {helpers.places_of(wrong)}"
            )
        residual = given.held(state)[name]
        helpers.assert_within(
            residual[:, ~unsure], left[:, ~unsure], 1e-6, f"residual of {name!r}"
        )
        assert (0.2 < min(shares) and max(shares) < 0.8) or name == "b"
