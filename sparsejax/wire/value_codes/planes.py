"""Small numbers as planes of bits: the lowest bits of all, then the next ones of all.

A plane has a bit of each number, in words of its own: 32 numbers of 6 bits are 6 words.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rank_select import WORD, pack, unpack


def plane_words(count: int, planes: int) -> int:
    """Words for some bits of each of `count` numbers."""
    return planes * -(-count // WORD)


def pack_planes(x: jax.Array, planes: int) -> jax.Array:
    """The lowest bits of uint32 [n], plane after plane, as words."""
    if not planes:
        return jnp.zeros(0, jnp.uint32)
    x = jnp.pad(x, (0, -x.size % WORD))
    shifts = lax.broadcasted_iota(jnp.uint32, (planes, 1), 0)
    return pack(((x[None] >> shifts) & 1) != 0).reshape(-1)


def unpack_planes(words: jax.Array, planes: int, count: int) -> jax.Array:
    """Inverse of `pack_planes`: uint32 [count]."""
    if not planes:
        return jnp.zeros(count, jnp.uint32)
    flags = unpack(words.reshape(planes, -1))[:, :count].astype(jnp.uint32)
    shifts = lax.broadcasted_iota(jnp.uint32, (planes, 1), 0)
    return jnp.sum(flags << shifts, axis=0, dtype=jnp.uint32)
