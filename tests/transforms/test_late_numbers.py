"""Which sparsifiers show a number that is not finite late: those whose elements have turns.

Of the others `test_bad_numbers` has each. On all ranks it shows in the same step.
"""

import functools

import jax
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import sparsifiers
from tests import helpers
from tests.transforms.test_bad_numbers import SIZE, Case, N, gradients, program


STEPS, STEP, RANK = 12, 1, 1


@functools.cache
def runs(**options):
    """A program, and what it makes of gradients without the number."""
    own = sparsejax.sparsify(sparsifiers.RandomK(0.2), min_size=100, **options)
    case = Case(lambda: optax.chain(own, sparsejax.dense_sync(reduce="sum")))
    run, grads = program(case, case.make()), gradients(STEPS, "float32", seed=2)
    return run, grads, run(grads)[0]["w"][0]


def outcome(place, **options):
    """Updates and states with a NaN on one rank at one step."""
    run, grads, _ = runs(**options)
    grads = {name: x.copy() for name, x in grads.items()}
    grads["w"][RANK, STEP, place] = np.nan
    updates, states = run(grads)
    helpers.assert_same_on_all_ranks(updates)
    assert np.isfinite(np.delete(updates["w"], place, 2)).all()
    return updates["w"][0], states


@pytest.mark.slow
def test_random_k_is_late_until_the_turn_of_its_place():
    """Its places are drawn before anything is known of the numbers, alike on all ranks."""
    _, _, clean = runs()
    # Whose turn comes late: some steps behind the gradient that has the number.
    first = np.argmax(clean[STEP:] != 0, 0) + STEP
    (places,) = np.nonzero((first == STEP + 4) & (clean[STEP:] != 0).any(0))
    assert 0 < len(places) < SIZE
    updates, states = outcome(places[0])
    shown = np.flatnonzero(~np.isfinite(updates[:, places[0]]))
    assert shown.tolist() == [STEP + 4]
    np.testing.assert_array_equal(updates[: STEP + 4], clean[: STEP + 4])
    # In the norm of the residuals all ranks see it at once, and until then.
    waits = (np.arange(STEPS) >= STEP) & (np.arange(STEPS) < STEP + 4)
    read = lambda state: sparsejax.metrics(state)["sparsify/residual_norm"]
    norms = np.asarray(jax.jit(jax.vmap(jax.vmap(read)))(states))
    assert (np.isfinite(norms) == ~waits).all()
    held = sparsejax.residuals(jax.tree.map(lambda x: x[:, STEP], states))["w"]
    others = np.delete(np.asarray(held).reshape(N, SIZE), RANK, 0)
    assert np.isfinite(others).all()
    assert not np.isfinite(np.asarray(held).reshape(N, SIZE)[RANK, places[0]])


@pytest.mark.slow
def test_without_a_memory_it_is_lost_with_what_is_not_chosen():
    _, _, clean = runs(memory=None)
    for was_drawn in (True, False):
        place = np.flatnonzero((clean[STEP] != 0) == was_drawn)[0]
        updates, _ = outcome(place, memory=None)
        shown = np.flatnonzero(np.isnan(updates[:, place]))
        assert shown.tolist() == [STEP] * was_drawn
