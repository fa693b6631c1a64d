"""Packing, rank and select, against NumPy; what is made of them: `test_kernels`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels
from pallas_kernels import rank_select
from tests import helpers


@functools.partial(jax.jit, static_argnums=(2, 3))
def select(words, first, length, lanes):
    return rank_select.select(
        rank_select.rank_index(words, lanes=lanes), first, length=length
    )


def test_double_precision_is_tested_by_its_bits_too():
    with jax.enable_x64(True):
        x = jnp.array([0.0, -0.0, 5e-324, np.nan, -1e-310, 1.0, 0.0], jnp.float64)
        found, count = kernels.compact(x, 7)
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


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_running_sums_and_totals_are_those_of_numpy(platform):
    with helpers.traced_for(platform):
        for length in (0, 1, 15, 16, 257, 4096, 4097, 70_000):
            x = np.random.default_rng(length).integers(-9, 999, (2, length), np.int32)
            found, total = rank_select.running_sum(x), rank_select.total(x)
            assert found.dtype == total.dtype == np.int32
            np.testing.assert_array_equal(found, np.cumsum(x, axis=1))
            np.testing.assert_array_equal(total, x.sum(axis=1))
            np.testing.assert_array_equal(rank_select.running_sum(x[1]), found[1])


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


@pytest.mark.parametrize("empty", [[], [0], [1, 2, 3]])
def test_select_finds_runs_in_several_parts_of_which_some_are_empty(empty):
    # 4 parts of 150 words, so that a part begins inside a row of 64 words.
    flags = np.random.default_rng(3).random((4, 150 * 32)) < [[0.01], [0.9], [0.2], [0.001]]
    flags[empty] = False
    starts = np.cumsum(flags.sum(axis=1)) - flags.sum(axis=1)
    words = helpers.packed(flags).reshape(-1)
    check_select(words, starts, 4800)
    check_select(words, starts + 15, 100)  # begun inside of the parts


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
