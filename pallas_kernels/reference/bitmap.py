"""Packs and lists the elements that are present, in plain XLA.

A list is found by a search for each rank in the bits (`rank_select`), and not by a prefix
sum over all elements. Lists of slots are converted to bits by a scatter.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.rank_select import WORD, nonzero, pack, rank_index, select


# The sentinel index of no element.
EMPTY = -1


def bitmap_encode(x):
    """Packs flags of the elements that are not zero, 32 to a word."""
    return pack(padded(nonzero(x)))


def bitmap_decode(words, capacity, fill):
    """Returns the positions of set bits, ascending and padded with `fill`; and a count."""
    index = rank_index(words, lanes=capacity)
    found = select(index, jnp.zeros(1, jnp.int32), length=capacity)[0]
    count = index.row_end[-1]
    return jnp.where(lax.iota(jnp.int32, capacity) < count, found, fill), count


def padded(flags):
    """Pads the last axis to whole words, at least one."""
    length = flags.shape[-1]
    missing = max(-length % WORD, WORD - length)
    return jnp.pad(flags, [(0, 0)] * (flags.ndim - 1) + [(0, missing)])
