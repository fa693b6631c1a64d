"""Which elements there are, in plain XLA: as packed bits, and as a list of indices.

A list is searched for in the bits, by rank (`rank_select`), in place of prefix sums.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.rank_select import WORD, nonzero, pack, rank_index, select


# The index of no element.
EMPTY = -1


def bitmap_encode(x):
    """Which elements are non-zero, 32 to a word."""
    return pack(padded(nonzero(x)))


def bitmap_decode(words, capacity, fill):
    """Where the set bits are, ascending, `fill` after the last; and how many there are."""
    index = rank_index(words, lanes=capacity)
    found = select(index, jnp.zeros(1, jnp.int32), length=capacity)[0]
    count = index.row_end[-1]
    return jnp.where(lax.iota(jnp.int32, capacity) < count, found, fill), count


def padded(flags):
    """Up to whole words, and at least one, on the last axis."""
    length = flags.shape[-1]
    missing = max(-length % WORD, WORD - length)
    return jnp.pad(flags, [(0, 0)] * (flags.ndim - 1) + [(0, missing)])
