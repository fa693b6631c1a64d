"""Packs and lists the elements that are present, in plain XLA.

A list is found by a search for each rank in the bits (`rank_select`), and not by a prefix
sum over all elements. Lists of slots are converted to bits by a scatter.
"""

import jax
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


def bitmaps_of(slots: jax.Array, is_there: jax.Array, words: int) -> jax.Array:
    """Returns the bitmaps of lists of slots, uint32 [lists, words].

    They are sums of one bit for each slot: a slot that occurs twice in a list carries over,
    and then fewer bits are set than there are slots.

    Args:
        slots: int32 [lists, k].
        is_there: Booleans [lists, k], which of the slots are real.
        words: The number of words of a bitmap.
    """
    lists = len(slots)
    first = words * lax.broadcasted_iota(jnp.int32, (lists, 1), 0)
    word = jnp.where(is_there, first + (slots >> 5), lists * words)
    one = jnp.uint32(1) << (slots & (WORD - 1)).astype(jnp.uint32)
    found = jnp.zeros(lists * words, jnp.uint32).at[word.reshape(-1)]
    found = found.add(one.reshape(-1), mode="drop", wrap_negative_indices=False)
    return found.reshape(lists, words)


def padded(flags):
    """Pads the last axis to whole words, at least one."""
    length = flags.shape[-1]
    missing = max(-length % WORD, WORD - length)
    return jnp.pad(flags, [(0, 0)] * (flags.ndim - 1) + [(0, missing)])
