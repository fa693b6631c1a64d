"""Which elements there are, in plain XLA: as packed bits, and as a list of indices.

A list is searched for in the bits, by rank (`rank_select`), in place of prefix sums. Lists
that come from elsewhere become bits by a scatter.
"""

import jax
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


def bitmaps_of(slots: jax.Array, is_there: jax.Array, words: int) -> jax.Array:
    """The bitmaps of lists of slots, uint32 [lists, words].

    They are the sums of the bits: a slot that occurs twice in a list carries, and then
    fewer bits are set than there are slots.

    Args:
        slots: int32 [lists, k].
        is_there: Booleans, which of them count.
        words: How many words a bitmap has.
    """
    lists = len(slots)
    first = words * lax.broadcasted_iota(jnp.int32, (lists, 1), 0)
    word = jnp.where(is_there, first + (slots >> 5), lists * words)
    one = jnp.uint32(1) << (slots & (WORD - 1)).astype(jnp.uint32)
    found = jnp.zeros(lists * words, jnp.uint32).at[word.reshape(-1)]
    found = found.add(one.reshape(-1), mode="drop", wrap_negative_indices=False)
    return found.reshape(lists, words)


def padded(flags):
    """Up to whole words, and at least one, on the last axis."""
    length = flags.shape[-1]
    missing = max(-length % WORD, WORD - length)
    return jnp.pad(flags, [(0, 0)] * (flags.ndim - 1) + [(0, missing)])
