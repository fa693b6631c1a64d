"""Sets of slots by part, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rank_select
from pallas_kernels.reference import slots
from sparsejax.units import bits
from tests import helpers


SHAPES = [(1, 1), (3, 2), (8, 65), (5, 200)]  # parts, words


def some_flags(parts, words, seed=0):
    """Parts of every kind: empty, full, the last slot alone, and random ones."""
    rng = np.random.default_rng(seed)
    flags = rng.random((parts, words * 32)) < rng.random((parts, 1)) ** 2
    flags[-1] = False
    flags[-1, -1] = True
    if parts > 2:
        flags[0] = False
        flags[1] = True
    return flags


@pytest.mark.parametrize(("parts", "words"), SHAPES)
def test_counts_are_those_of_the_parts(parts, words):
    flags = some_flags(parts, words)
    _, counts = slots.slots_of(helpers.packed(flags), jnp.int32(0), 1)
    np.testing.assert_array_equal(counts, flags.sum(axis=1))
    assert counts.dtype == np.int32


@pytest.mark.parametrize(("parts", "words"), SHAPES)
def test_slots_of_a_run_of_ranks_are_found_in_every_part(parts, words):
    flags = some_flags(parts, words)
    length = min(words * 32, 500)

    @jax.jit
    def listed(words, first):
        return slots.slots_of(words, first, length)[0]

    packed = helpers.packed(flags)
    for first in (0, 1, 33, words * 16):
        found = np.asarray(listed(packed, first))
        assert found.shape == (parts, length)
        for part in range(parts):
            expected = np.flatnonzero(flags[part])[first : first + length]
            np.testing.assert_array_equal(found[part, : len(expected)], expected)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 256, 257, 8192, 100_003])
def test_totals_are_those_of_numpy(size):
    x = np.random.default_rng(size).integers(0, 1 << 12, (3, size), dtype=np.int32)
    totals = jax.jit(rank_select.total)(x)
    np.testing.assert_array_equal(totals, x.sum(axis=1))
    assert totals.dtype == np.int32
    np.testing.assert_array_equal(jax.jit(bits.count)(x[0] > 5), (x[0] > 5).sum())


def test_places_that_are_apart_end_where_int32_does():
    size = 2**31 - 3
    real = np.array([True, False, False, False, False])
    places = np.asarray(bits.unique_places(jnp.arange(5), real, size))
    np.testing.assert_array_equal(places, [0, size + 1, size + 2, size + 2, size + 2])


def test_a_row_counts_when_any_of_its_numbers_does_and_not_by_its_sum():
    x = jnp.array([[0.0, 0.0], [1.0, -1.0], [0.0, jnp.nan], [-0.0, 0.0], [0.0, 1e-45]])
    np.testing.assert_array_equal(bits.nonzero_units(x), [0, 1, 1, 0, 1])


def test_units_may_be_numbers_or_have_several_axes():
    x = np.zeros((4, 2, 3), np.float32)
    x[2, 1, 0] = 5
    np.testing.assert_array_equal(bits.nonzero_units(x), [0, 0, 1, 0])
    np.testing.assert_array_equal(bits.nonzero_units(x[:, 1, 0]), [0, 0, 1, 0])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("width", [3, 64, *helpers.slow(1, 2, 8, 12)])
def test_a_unit_of_any_width_counts_for_any_bit_but_signs_wherever_it_is(width, dtype):
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    units = [np.zeros(width), np.full(width, -0.0), np.resize([0.0, -0.0], width)]
    empty = len(units)
    for at in range(width):
        for zero in (0.0, -0.0):
            for value in (np.nan, tiny, -tiny, 1, -np.inf):
                unit = np.full(width, zero)
                unit[at] = value
                units.append(unit)
            # Next to one another and as far apart as can be; what they add up to is zero.
            for other in {(at + 1) % width, (at + width // 2) % width} - {at}:
                unit = np.full(width, zero)
                unit[at], unit[other] = 1, -1
                units.append(unit)
    x = np.stack(units).astype(dtype)
    expected = helpers.is_nonzero(x).any(axis=1)
    assert not expected[:empty].any()
    assert expected[empty:].all()
    for find in (bits.nonzero_units, jax.jit(bits.nonzero_units)):
        found = np.asarray(find(x))
        assert found.dtype == bool
        np.testing.assert_array_equal(found, expected)
        # The same numbers as units of several axes.
        np.testing.assert_array_equal(find(x.reshape(len(x), -1, 1)), expected)
        if width % 2 == 0:
            np.testing.assert_array_equal(find(x.reshape(len(x), 2, -1)), expected)
