"""Bit planes of small numbers: the lowest bits of all numbers, then the next bits of all.

A plane has one bit of each number, in words of its own: 32 numbers of 6 bits take 6 words.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rank_select import WORD, pack, unpack


def plane_words(count: int, planes: int) -> int:
    """Returns the words for `planes` bits of each of `count` numbers."""
    return planes * -(-count // WORD)


def pack_planes(x: jax.Array, planes: int) -> jax.Array:
    """Packs the lowest `planes` bits of uint32 [n] into words, plane after plane."""
    if not planes:
        return jnp.zeros(0, jnp.uint32)
    x = jnp.pad(x, (0, -x.size % WORD))
    shifts = lax.broadcasted_iota(jnp.uint32, (planes, 1), 0)
    return pack(((x[None] >> shifts) & 1) != 0).reshape(-1)


def unpack_planes(words: jax.Array, planes: int, count: int) -> jax.Array:
    """Unpacks bit planes to uint32 [count]; inverts `pack_planes`."""
    if not planes:
        return jnp.zeros(count, jnp.uint32)
    flags = unpack(words.reshape(planes, -1))[:, :count].astype(jnp.uint32)
    shifts = lax.broadcasted_iota(jnp.uint32, (planes, 1), 0)
    return jnp.sum(flags << shifts, axis=0, dtype=jnp.uint32)
