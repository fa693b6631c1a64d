"""Inputs: sets that a bad ownership would give to few ranks, and sparse gradients."""

import math
from typing import Any

import numpy as np


def strided_set(size: int, count: int, stride: int) -> np.ndarray:
    """`count` units a stride apart; at the end it starts again, one unit further on."""
    starts = -(-count // (size // stride))
    rounds = [np.arange(start, size, stride) for start in range(starts)]
    return np.sort(np.concatenate(rounds)[:count])


def zipf_set(size: int, count: int, seed: int = 0) -> np.ndarray:
    """`count` distinct units drawn with probability proportional to 1 / (unit + 1)."""
    rng = np.random.default_rng(seed)
    units = np.array([], np.int64)
    while len(units) < count:
        drawn = (size ** rng.random(2 * count)).astype(np.int64) - 1
        fresh = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
        units = np.concatenate([units, fresh[~np.isin(fresh, units)]])
    return np.sort(units[:count])


def adversarial_sets(size: int, count: int, n: int) -> dict[str, np.ndarray]:
    """Sets of `count` units that a bad ownership would give to few of n ranks.

    Zen's hash bound is to hold for any set. Where count strides do not fit into `size`, a
    strided set goes round again, one unit further on.
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
    """Gradients [n, size, *shape] with that share of units non-zero, a density a rank.

    The numbers are small integers, so that every sum is exact in every dtype. A unit that
    is a row may hold zeros, and may sum to zero.
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
