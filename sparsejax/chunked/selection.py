"""The k entries of largest magnitude of each block, by place.

Exact, and the same on every run: of equal magnitudes those at the lowest places are taken.
NaN counts as larger than infinity, as in all that selects here, so it is sent at once.

`lax.top_k` does it on GPUs. On CPUs it takes several times as long as copying the array.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.operations.bitmap import bitmap_decode
from sparsejax.units import bits
from sparsejax.units.selection import magnitudes


def largest(blocks: jax.Array, k: int) -> jax.Array:
    """The places of the k largest magnitudes of each block, ascending.

    Args:
        blocks: Floating [blocks, length].
        k: How many, at most the length.

    Returns:
        int32 [blocks, k].
    """
    count, length = blocks.shape
    if k == length:
        return lax.broadcasted_iota(jnp.int32, (count, k), 1)
    values, places = lax.top_k(jnp.abs(blocks), k)
    # The last of them says where to stop among those that are equal to it.
    return _listed(blocks, values[:, -1:], places[:, -1:], k)


def _listed(blocks, least, last, k):
    """The places of what is above `least`, and of what equals it up to the place `last`."""
    count, length = blocks.shape
    keys, least = magnitudes.keys(blocks), magnitudes.keys(least)
    place = lax.broadcasted_iota(jnp.int32, blocks.shape, 1)
    chosen = (keys > least) | ((keys == least) & (place <= last))
    chosen = jnp.pad(chosen.reshape(-1), (0, -chosen.size % bits.WORD))
    found, _ = bitmap_decode(bits.pack(chosen), count * k)
    starts = lax.broadcasted_iota(jnp.int32, (count, 1), 0) * length
    return found.reshape(count, k) - starts
