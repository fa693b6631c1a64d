"""The k-th largest magnitude is exact, whatever the data, and ties take turns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sparsejax.units.selection import magnitudes
from tests import helpers


SIZES = (100, 40_001)  # halved as it is, and by way of a sample


def arrays(size):
    rng = np.random.default_rng(size)
    normal = rng.standard_normal(size)
    yield "normal", normal
    yield "constant", np.full(size, -0.5)
    yield "zeros", np.zeros(size)
    yield "few", np.where(rng.random(size) < 0.001, normal, 0)
    yield "long tails", rng.standard_cauchy(size)
    yield "nan and inf", np.where(rng.random(size) < 0.1, np.nan, normal * np.inf)
    yield "denormal", normal * 1e-41
    yield "two values", np.where(rng.random(size) < 0.5, 1.0, 1.0 + 1e-7)
    # A sample that strides past all that is large.
    yield "one block", np.where(np.arange(size) < size // 50, 10 + normal, normal / 100)


@functools.cache
def compiled(size):
    def run(x, k, seed):
        words = magnitudes.largest(x, k, seed)
        return magnitudes.kth_largest(x, k, seed), words

    return jax.jit(run)


@pytest.mark.parametrize("size", helpers.mostly_slow(SIZES, 100))
def test_the_kth_largest_is_exact(size):
    for name, x in arrays(size):
        x = x.astype(np.float32)
        order = np.sort(x.view(np.uint32) & 0x7FFFFFFF)[::-1]
        for k in (1, size // 100, size // 2, size):
            found, words = compiled(size)(x, np.int32(k), np.uint32(k))
            assert found == order[k - 1], (name, k)
            chosen = helpers.unpacked(words)[:size]
            keys = x.view(np.uint32) & 0x7FFFFFFF
            assert chosen.sum() == min(k, np.count_nonzero(keys)), (name, k)
            if 0 < chosen.sum() < size:
                assert keys[chosen].min() >= keys[~chosen].max(), (name, k)


def test_equal_ones_go_in_turns():
    """Of a constant array every element goes about as often as any other."""
    size, k, steps = SIZES[0], 20, 400
    x = np.ones(size, np.float32)
    went = np.zeros(size)
    for step in range(steps):
        _, words = compiled(size)(x, np.int32(k), np.uint32(step * 7919))
        went += helpers.unpacked(words)[:size]
    assert went.sum() == k * steps
    assert went.min() > 0.5 * went.mean()
    assert went.max() < 1.5 * went.mean()


@pytest.mark.slow
def test_shards_have_one_kth_largest():
    n, size = 4, 40_001
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((n, size)) * [[1], [5], [0.1], [2]]).astype(np.float32)
    mesh = helpers.grid(model=n)
    shards = magnitudes.Shards(
        add=lambda y: jax.lax.psum(y, "model"),
        join=lambda y: jax.lax.all_gather(y, "model").reshape(-1),
    )

    def run(x):
        k = jnp.int32(n * size // 100)
        return magnitudes.kth_largest(x[0], k, jnp.uint32(9), shards)[None]

    step = helpers.shard_map(run, mesh=mesh, in_specs=P("model"), out_specs=P("model"))
    found = np.asarray(jax.jit(step)(x))
    want = np.sort(np.abs(x).reshape(-1))[::-1][n * size // 100 - 1]
    np.testing.assert_array_equal(found.view(np.float32), want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_digits_find_what_halving_finds(dtype):
    with jax.enable_x64(dtype == np.float64):
        rng = np.random.default_rng(0)
        x = rng.standard_t(2, 500).astype(dtype) * (rng.random(500) < 0.6)
        x[:3] = np.nan, np.inf, 1e-42
        find = jax.jit(
            lambda x, k: (magnitudes.kth_by_digits(x, k), magnitudes.kth_by_bits(x, k))
        )
        for k in (1, 2, 3, 4, 250, 290, 400, 500, 501):
            by_digits, by_bits = find(x, np.int32(k))
            assert by_digits == by_bits, k
