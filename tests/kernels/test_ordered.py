"""Ordered sums of lists whose indices repeat.

Messages that are added sender by sender are among those of `checks`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.reference import ordered
from tests import helpers


# JAX says so from 0.11 on.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton:DeprecationWarning")


def equations(program):
    return [eqn for _, eqn in helpers.equations(program)]


def added(total, places, values):
    """The sums in float64."""
    total = np.array(total, np.float64)
    for place, value in zip(places, values, strict=True):
        if place < len(total):
            total[place] += value
    return total


# Runs of less than what is added at once, of as many, and of several times as many.
LISTS = [(1, 3), (7, 5), (100, 1), (3000, 700)]


@pytest.mark.parametrize(("count", "size"), helpers.mostly_slow(LISTS, (7, 5)))
def test_a_list_whose_indices_repeat_is_added(count, size):
    rng = np.random.default_rng(count)
    # A third is left out, and some behind the end by far.
    places = rng.integers(0, size + size // 2 + 1, count).astype(np.int32)
    places[::7] = 2**31 - 1
    values = rng.integers(-64, 65, (count, 3)).astype(np.float32)
    total = rng.integers(-64, 65, (size, 3)).astype(np.float32)
    wanted = added(total, places, values)
    with helpers.for_gpus():
        found = jax.jit(ordered.add_repeated)(total, places, values)
        numbers = jax.jit(ordered.add_repeated)(total[:, 0], places, values[:, 0])
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(numbers, wanted[:, 0])
    on_cpus = jax.jit(ordered.add_repeated)(total, places, values)
    np.testing.assert_array_equal(on_cpus, wanted)


def test_infinities_and_nans_reach_their_own_sums_alone():
    places = np.array([0, 1, 0, 2, 1, 2], np.int32)
    values = np.array([np.inf, 1.0, -np.inf, np.nan, 2.0, 1.0], np.float32)
    with helpers.for_gpus():
        found = jax.jit(ordered.add_repeated)(np.zeros(4, np.float32), places, values)
    np.testing.assert_array_equal(found, [np.nan, 3.0, np.nan, 0.0])


def test_distinct_indices_are_not_sorted():
    arrays = jnp.zeros(5), jnp.array([4, 9, 0, 9]), jnp.arange(4.0)
    with helpers.for_gpus():
        for distinct in (False, True):
            run = functools.partial(ordered.add_repeated, distinct=distinct)
            names = {e.primitive.name for e in equations(jax.make_jaxpr(run)(*arrays))}
            assert ("sort" in names) is not distinct
            np.testing.assert_array_equal(jax.jit(run)(*arrays), [2.0, 0, 0, 0, 0])


@pytest.mark.parametrize("senders", [1, 4, 9])
def test_senders_are_added_in_their_order(senders):
    """Halves of the last bit, that are lost one by one, in the order of the senders."""
    rng = np.random.default_rng(senders)
    values = (rng.standard_normal((senders, 6)) * 10.0 ** rng.integers(0, 8, 6)).astype(
        "f4"
    )
    places = np.stack([rng.permutation(8)[:6] for _ in range(senders)]).astype(np.int32)
    wanted = np.zeros(7, np.float32)  # place 7 is behind the end
    for sender in range(senders):
        for place, value in zip(places[sender], values[sender], strict=True):
            if place < 7:
                wanted[place] += value
    found = jax.jit(ordered.add_senders)(np.zeros(7, np.float32), places, values)
    assert np.asarray(found).tobytes() == wanted.tobytes()


def test_places_that_are_left_out_are_apart():
    places = np.array([[0, 5, 9, 2], [5, 5, 5, 1]], np.int32)
    np.testing.assert_array_equal(
        ordered.unique_places(places, 5), [[0, 6, 7, 2], [5, 6, 7, 1]]
    )
    # Where int32 ends, so do they.
    most = 2**31 - 1
    found = np.asarray(ordered.unique_places(np.full(4, most, np.int32), most - 1))
    assert ((found >= most - 1) & (found <= most)).all()
