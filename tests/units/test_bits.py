"""Sets of slots by part, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.reference import slots
from sparsejax.units import bits
from tests import helpers


# By a search, by what each unit writes, and by words.
WAYS = [("cpu", slots._FEW_UNITS), ("cuda", slots._FEW_UNITS), ("cuda", 0)]


@pytest.mark.parametrize(("platform", "few"), WAYS)
@pytest.mark.parametrize("words", [1, 65, *helpers.slow(31, 500)])
def test_slots_of_a_run_of_ranks_are_those_of_numpy(platform, few, words, monkeypatch):
    """In parts of every kind: empty, almost so, full, and the last slot alone."""
    monkeypatch.setattr(slots, "_FEW_UNITS", few)
    rng = np.random.default_rng(words)
    flags = rng.random((5, 32 * words)) < [[0.0], [0.02], [0.6], [1.0], [0.0]]
    flags[-1, -1] = True
    with helpers.traced_for(platform):
        listed = jax.jit(slots.slots_of, static_argnums=2)
        for first, length in (
            (0, 64),
            (1, 64),
            (33, 64),
            (0, 2000),
            (7, 5),
            (16 * words, 40),
        ):
            found, counts = listed(helpers.packed(flags), jnp.int32(first), length)
            assert found.shape == (5, length)
            assert counts.dtype == np.int32
            np.testing.assert_array_equal(counts, flags.sum(axis=1))
            for part, row in enumerate(flags):
                expected = np.flatnonzero(row)[first : first + length]
                np.testing.assert_array_equal(found[part, : len(expected)], expected)


def test_places_that_are_apart_end_where_int32_does():
    size = 2**31 - 3
    real = np.array([True, False, False, False, False])
    places = np.asarray(bits.unique_places(jnp.arange(5), real, size))
    np.testing.assert_array_equal(places, [0, size + 1, size + 2, size + 2, size + 2])


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
