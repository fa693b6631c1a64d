"""When a number that is not finite, and is passed on, shows: which sparsifiers are late.

`docs/sharp_bits.md` says it of each. On all ranks it shows in the same step.
"""

import functools

import jax
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import sparsifiers
from tests import helpers
from tests.laws import test_conservation as tables
from tests.transforms.test_bad_numbers import SIZE, Case, N, gradients, program


STEPS, STEP, RANK = 12, 1, 1
PLACE = 1203
# Of these one may find no slot, or not have its turn.
BY_SLOTS = {name for name in tables.SPARSIFIERS if name.startswith("Dragonn")}
BY_TURNS = {
    name for name, make in tables.SPARSIFIERS.items() if getattr(make(0.1), "shared", False)
}
AT_ONCE = tables.SPARSIFIERS.keys() - BY_SLOTS - BY_TURNS
# Of magnitudes, and rounded.
ALWAYS = ["TopK", "Sign"]


@functools.cache
def runs(make, density, **options):
    """A program, and what it makes of gradients without the number."""
    own = sparsejax.sparsify(make(density), min_size=100, **options)
    case = Case(lambda: optax.chain(own, sparsejax.dense_sync(reduce="sum")))
    run, grads = program(case, case.make()), gradients(case, STEPS, "float32", seed=2)
    return run, grads, run(grads)[0]["w"][0]


def outcome(make, density, place, value, **options):
    """Updates and states with a number on one rank at one step, and those without it."""
    run, grads, clean = runs(make, density, **options)
    grads = {name: x.copy() for name, x in grads.items()}
    grads["w"][RANK, STEP, place] = value
    updates, states = run(grads)
    helpers.assert_same_on_all_ranks(updates)
    assert np.isfinite(np.delete(updates["w"], place, 2)).all()
    return updates["w"][0], states, clean


def norms(states):
    """The norm of the residuals as each rank reads it, [ranks, steps]."""
    read = lambda state: sparsejax.metrics(state)["sparsify/residual_norm"]
    return np.asarray(jax.jit(jax.vmap(jax.vmap(read)))(states))


@pytest.mark.parametrize("name", helpers.mostly_slow(sorted(AT_ONCE | BY_SLOTS), *ALWAYS))
def test_where_there_is_room_it_shows_in_its_step(name):
    updates, states, _ = outcome(tables.SPARSIFIERS[name], 0.05, PLACE, np.nan)
    shown = np.flatnonzero(np.isnan(updates[:, PLACE]))
    if name in AT_ONCE:
        why = f"{name} sends it at {shown.tolist()}: is it `shared`?"
        assert shown.tolist() == [STEP], why
    else:
        assert len(shown) == 1
        assert shown[0] >= STEP
    finite = np.isfinite(norms(states))
    waits = (np.arange(STEPS) >= STEP) & (np.arange(STEPS) < shown[0])
    assert (finite == ~waits).all()


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, *helpers.slow(np.inf)])
def test_random_k_is_late_until_the_turn_of_its_place(value):
    """Its places are drawn before anything is known of the numbers, alike on all ranks."""
    density = 0.2
    _, _, clean = runs(sparsifiers.RandomK, density)
    # Whose turn comes late: some steps behind the gradient that has the number.
    first = np.argmax(clean[STEP:] != 0, 0) + STEP
    (places,) = np.nonzero((first == STEP + 4) & (clean[STEP:] != 0).any(0))
    assert 0 < len(places) < SIZE
    updates, states, clean = outcome(sparsifiers.RandomK, density, places[0], value)
    shown = np.flatnonzero(~np.isfinite(updates[:, places[0]]))
    assert shown.tolist() == [STEP + 4]
    np.testing.assert_array_equal(updates[: STEP + 4], clean[: STEP + 4])
    # In the norm of the residuals all ranks see it at once, and until then.
    waits = (np.arange(STEPS) >= STEP) & (np.arange(STEPS) < STEP + 4)
    assert (np.isfinite(norms(states)) == ~waits).all()
    held = sparsejax.residuals(jax.tree.map(lambda x: x[:, STEP], states))["w"]
    others = np.delete(np.asarray(held).reshape(N, SIZE), RANK, 0)
    assert np.isfinite(others).all()
    assert not np.isfinite(np.asarray(held).reshape(N, SIZE)[RANK, places[0]])


@pytest.mark.slow
def test_without_a_memory_it_is_lost_with_what_is_not_chosen():
    make, options = sparsifiers.RandomK, {"memory": None}
    _, _, clean = runs(make, 0.2, **options)
    for was_drawn in (True, False):
        place = np.flatnonzero((clean[STEP] != 0) == was_drawn)[0]
        updates, _, _ = outcome(make, 0.2, place, np.nan, **options)
        shown = np.flatnonzero(np.isnan(updates[:, place]))
        assert shown.tolist() == [STEP] * was_drawn
