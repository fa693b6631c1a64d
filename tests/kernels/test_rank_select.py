"""Packing, rank and select, against NumPy."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import pallas_kernels as kernels
from pallas_kernels import rank_select
from tests import helpers


SIZES = [1, 7, 31, 32, 33, 2047, 2048, 2049, 100_003]
DENSITIES = [0.0, 0.001, 0.03, 0.5, 1.0]
SMALLEST = {"float32": 1e-45, "bfloat16": 2.0**-133, "float16": 2.0**-24}

compact = jax.jit(kernels.compact, static_argnums=1)
bitmap_decode = jax.jit(kernels.bitmap_decode, static_argnums=1)


@functools.partial(jax.jit, static_argnums=(2, 3))
def select(words, first, length, lanes):
    return rank_select.select(
        rank_select.rank_index(words, lanes=lanes), first, length=length
    )


def check_compact(x, capacity):
    found, count = compact(x, capacity)
    expected = np.flatnonzero(helpers.is_nonzero(x))
    assert found.shape == (capacity,)
    assert found.dtype == np.int32
    assert int(count) == len(expected)
    fill = np.full(max(0, capacity - len(expected)), x.size)
    np.testing.assert_array_equal(found, np.concatenate([expected[:capacity], fill]))


@pytest.mark.parametrize("size", helpers.mostly_slow(SIZES, 33, 2049))
def test_compact_finds_every_element_at_any_density(size):
    # Above 5000 the capacity is below some counts and above others.
    for density in DENSITIES:
        x = helpers.gradients(1, size, density, seed=size)[0]
        check_compact(x, min(size + 3, 5000))


@pytest.mark.parametrize("size", [33, 2049, 100_003])
def test_compact_counts_what_its_capacity_cannot_hold(size):
    x = helpers.gradients(1, size, 0.6, seed=1)[0]
    assert np.count_nonzero(x) > 5
    check_compact(x, 5)


@pytest.mark.parametrize("size", [1, 32, 33, 2049])
def test_compact_finds_the_first_and_the_last_element(size):
    for alone in (0, size - 1):
        x = np.zeros(size, np.float32)
        x[alone] = -2.5
        found, count = compact(x, min(size + 3, 5000))
        assert int(count) == 1
        assert found[0] == alone
        assert (np.asarray(found)[1:] == size).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nan_infinity_and_denormals_count_and_negative_zero_does_not(dtype):
    values = [0.0, -0.0, np.nan, np.inf, -np.inf, SMALLEST[dtype], -SMALLEST[dtype], -0.0]
    x = np.array(values).astype(jnp.dtype(dtype))
    # All of them are there: the smallest were not rounded to zero on the way.
    assert np.count_nonzero(helpers.is_nonzero(x)) == 5
    found, count = compact(x, 8)
    assert int(count) == 5
    np.testing.assert_array_equal(found, [2, 3, 4, 5, 6, 8, 8, 8])
    flags = np.asarray(jax.jit(rank_select.nonzero)(x))
    np.testing.assert_array_equal(flags, [0, 0, 1, 1, 1, 1, 1, 0])


def test_double_precision_is_tested_by_its_bits_too():
    with jax.enable_x64(True):
        x = jnp.array([0.0, -0.0, 5e-324, np.nan, -1e-310, 1.0, 0.0], jnp.float64)
        found, count = compact(x, 7)
    assert int(count) == 4
    np.testing.assert_array_equal(found, [2, 3, 4, 5, 7, 7, 7])


def test_pack_puts_the_first_flag_lowest():
    flags = np.zeros((2, 64), bool)
    flags[0, [0, 5, 31, 32]] = True
    flags[1, 63] = True
    words = np.asarray(rank_select.pack(flags))
    assert words.dtype == np.uint32
    # 2**0 + 2**5 + 2**31, then the first bit of the next word, and the last bit.
    np.testing.assert_array_equal(words, [[0x80000021, 1], [0, 0x80000000]])


@pytest.mark.parametrize("shape", [(3, 96), *helpers.slow(((0,),), ((32,),), ((2048,),))])
def test_unpack_inverts_pack(shape):
    flags = np.random.default_rng(0).random(shape) < 0.4
    words = rank_select.pack(flags)
    assert words.shape == (*shape[:-1], shape[-1] // 32)
    np.testing.assert_array_equal(words, helpers.packed(flags))
    np.testing.assert_array_equal(rank_select.unpack(words), flags)


@pytest.mark.parametrize("words", [65, *helpers.slow(1, 64, 300)])
def test_bitmap_decode_inverts_bitmap_encode(words):
    size = 32 * words
    for density in DENSITIES:
        x = helpers.gradients(1, size, density, seed=words)[0]
        bitmap = jax.jit(kernels.bitmap_encode)(x)
        np.testing.assert_array_equal(bitmap, helpers.packed(x != 0))
        found, count = bitmap_decode(bitmap, size)
        expected = np.flatnonzero(x)
        assert int(count) == len(expected)
        fill = np.full(size - len(expected), size)
        np.testing.assert_array_equal(found, np.concatenate([expected, fill]))


@pytest.mark.parametrize("length", [15, 4097, *helpers.slow(0, 1, 16, 17, 256, 257)])
def test_running_sums_are_those_of_numpy(length):
    x = np.random.default_rng(length).integers(-9, 99, (2, length), dtype=np.int32)
    found = rank_select.running_sum(x)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, np.cumsum(x, axis=1))
    np.testing.assert_array_equal(rank_select.running_sum(x[1]), np.cumsum(x[1]))


def check_select(words, first, length):
    """Right where a run has a bit of its own for the rank; in range elsewhere."""
    # The longest rows, rows of one word, and something in between.
    for lanes in (0, 1 << 20, -(-len(words) // 8)):
        positions = select(words, np.asarray(first, np.int32), length, lanes)
        _check_positions(words, first, length, np.asarray(positions))


def _check_positions(words, first, length, positions):
    assert positions.shape == (len(first), length)
    room = 32 * rank_select.ROW * -(-len(words) // rank_select.ROW)
    assert (positions >= 0).all()
    assert (positions < room).all()
    bits = np.flatnonzero(helpers.unpacked(words))
    ends = [*first[1:], len(bits)]
    for run, (start, end) in enumerate(zip(first, ends, strict=True)):
        expected = bits[start : min(start + length, end)]
        np.testing.assert_array_equal(positions[run, : len(expected)], expected)


@pytest.mark.parametrize("empty", [[], [0], [1, 2], [3], [0, 1, 2, 3]])
def test_select_finds_runs_in_several_parts_of_which_some_are_empty(empty):
    # 4 parts of 150 words, so that a part begins inside a row of 64 words.
    flags = np.random.default_rng(3).random((4, 150 * 32)) < [[0.01], [0.9], [0.2], [0.001]]
    flags[empty] = False
    starts = np.cumsum(flags.sum(axis=1)) - flags.sum(axis=1)
    check_select(helpers.packed(flags).reshape(-1), starts, 4800)


@pytest.mark.slow
def test_select_takes_runs_that_begin_inside_the_parts():
    flags = np.random.default_rng(4).random((4, 150 * 32)) < 0.3
    starts = np.cumsum(flags.sum(axis=1)) - flags.sum(axis=1)
    words = helpers.packed(flags).reshape(-1)
    for first in (100, 1000, 1300):
        check_select(words, starts + first, 100)


def test_select_stays_in_range_beyond_the_last_bit():
    words = helpers.packed(np.random.default_rng(5).random(600 * 32) < 0.5)
    check_select(words, [0, 9_000, 50_000, 2_000_000_000], 100)
    check_select(np.zeros(600, np.uint32), [0, 0, 7, 1000], 100)


@pytest.mark.slow
def test_select_crosses_rows_that_are_full_and_rows_that_are_empty():
    flags = np.zeros((10, 64 * 32), bool)  # rows of the rank index
    flags[[1, 2, 5]] = True
    flags[9, -1] = True
    words = helpers.packed(flags).reshape(-1)
    check_select(words, [0], 3 * 2048 + 1)
    check_select(words, [2047, 2048, 4096, 6144], 64)


@pytest.mark.parametrize("lanes", [0, 40, 1 << 20])
@pytest.mark.parametrize("words", [1, 17, *helpers.slow(16, 300)])
def test_the_rank_of_a_position_is_how_many_bits_lie_below(words, lanes):
    flags = np.random.default_rng(words).random(32 * words) < 0.4
    index = rank_select.rank_index(helpers.packed(flags), lanes=lanes)
    found = rank_select.rank_of(index, np.arange(32 * words, dtype=np.int32))
    np.testing.assert_array_equal(found, np.cumsum(flags) - flags)


@pytest.mark.slow
@hypothesis.given(data=st.data())
def test_select_agrees_with_numpy_on_any_words(data):
    count = data.draw(st.sampled_from([3, 70]))
    words = data.draw(arrays.arrays(np.uint32, count, elements=st.integers(0, 2**32 - 1)))
    check_select(words, [0], count * 32)


@hypothesis.given(data=st.data())
def test_compact_agrees_with_numpy_on_any_values(data):
    dtype = data.draw(st.sampled_from([np.float32, np.float16]))
    size = data.draw(st.sampled_from([5, 100]))
    width = 8 * np.dtype(dtype).itemsize
    bits = arrays.arrays(f"u{width // 8}", size, elements=st.integers(0, 2**width - 1))
    check_compact(data.draw(bits).view(dtype), 64)
