"""Inputs: sets of units that are hard to divide among owners, and sparse gradients."""

import math
from typing import Any

import numpy as np


def strided_set(size: int, count: int, stride: int) -> np.ndarray:
    """Returns `count` units a stride apart; past the end it restarts one unit later."""
    starts = -(-count // (size // stride))
    rounds = [np.arange(start, size, stride) for start in range(starts)]
    return np.sort(np.concatenate(rounds)[:count])


def zipf_set(size: int, count: int, seed: int = 0) -> np.ndarray:
    """Draws `count` distinct units with probability proportional to 1 / (unit + 1)."""
    rng = np.random.default_rng(seed)
    units = np.array([], np.int64)
    while len(units) < count:
        drawn = (size ** rng.random(2 * count)).astype(np.int64) - 1
        fresh = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
        units = np.concatenate([units, fresh[~np.isin(fresh, units)]])
    return np.sort(units[:count])


def adversarial_sets(size: int, count: int, n: int) -> dict[str, np.ndarray]:
    """Returns sets of `count` units that a bad ownership would give to few of n ranks.

    Zen's hash bound has to hold for any set. If `count` strides do not fit into `size`, a
    strided set restarts one unit later.
    """
    assert count <= size
    start = (size - count) // 3
    return {
        "a range": np.arange(start, start + count),
        "every n-th": strided_set(size, count, n),
        "every n*n-th": strided_set(size, count, n * n),
        "every 32nd": strided_set(size, count, 32),
        "every 1024th": strided_set(size, count, 1024),
        "every 65536th": strided_set(size, count, 65536),
        "every size/n-th": strided_set(size, count, size // n),
        "Zipf": zipf_set(size, count),
    }


def gradients(
    n: int,
    size: int,
    density: float | list[float],
    dtype: Any = np.float32,
    shape: tuple[int, ...] = (),
    seed: int = 0,
) -> np.ndarray:
    """Returns gradients [n, size, *shape] in which a share of the units is non-zero.

    `density` is this share, for all ranks or for each. The elements are small integers, so
    that every sum is exact in every dtype. A non-zero row may have zeros, and may sum to
    zero.
    """
    rng = np.random.default_rng(seed)
    densities = [density] * n if isinstance(density, (int, float)) else density
    x = np.zeros((n, size, *shape))
    for rank, share in enumerate(densities):
        units = rng.permutation(size)[: round(share * size)]
        rows = rng.integers(-4, 5, (len(units), math.prod(shape)))
        rows[(rows == 0).all(axis=1), 0] = 1
        x[rank, units] = rows.reshape(len(units), *shape)
    return x.astype(dtype)
