"""The strawman loses what the formula says, and only that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.papers import lossy_strawman
from tests import helpers


SIZE = 1 << 18


@pytest.mark.parametrize(("memory", "density"), [(0.25, 0.02), (1.0, 0.4), (4.0, 0.1)])
def test_the_share_that_survives_is_that_of_random_places(memory, density):
    flags = np.random.default_rng(0).random(SIZE) < density
    left = np.asarray(jax.jit(lossy_strawman.survivors, static_argnums=1)(flags, memory))
    assert not (left & ~flags).any()
    ratio = memory * SIZE / flags.sum()
    expected = ratio * -np.expm1(-1 / ratio)
    # Three standard deviations of as many places, at most 0.5 each.
    room = 3 * 0.5 / np.sqrt(flags.sum())
    assert left.sum() / flags.sum() == pytest.approx(expected, abs=room)


@pytest.mark.slow
def test_the_total_is_the_sum_of_survivors_and_replicas_are_equal():
    scheme = lossy_strawman.LossyStrawman(memory=0.5, seed=3)
    x = helpers.gradients(4, 3001, 0.3)
    left = np.stack([lossy_strawman.survivors(jnp.asarray(row != 0), 0.5, 3) for row in x])
    total = helpers.run_ranks(
        lambda x: lossy_strawman.total_of(scheme, x, helpers.AXIS), x, 4
    )
    np.testing.assert_array_equal(total[0], np.where(left, x, 0).sum(0))
    helpers.assert_same_on_all_ranks(total)
    assert (np.where(left, x, 0).sum(0) != x.sum(0)).any()
    other = lossy_strawman.survivors(jnp.asarray(x[0] != 0), 0.5, 4)
    assert (np.asarray(other) != left[0]).any()
