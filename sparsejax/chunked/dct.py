"""The cosine transform of blocks, of whose coefficients the largest are sent: DeMo's.

Nothing goes over the wire here. A leaf is cut as `blocks.BlockCut` says, and each block of
height x width numbers X is turned into as many coefficients, in the same places,

    C = D(height) X D(width)^T    and back    X = D(height)^T C D(width)

with D the orthonormal DCT-II, so D D^T = 1: two products with matrices of at most 64 rows.
What is left of the coefficients of a block that was sent in part is, transformed back, what
is left of the block, since sums stay sums:

    x - inverse(sent) == inverse(forward(x) - sent)

All ranks transform the same sum back, by the same program, so replicas stay equal where
their devices multiply matrices in the same order: devices of one kind.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax.chunked.blocks import BlockCut


def forward(cut: BlockCut, x: jax.Array) -> jax.Array:
    """The coefficients of a leaf, each block's in its place."""
    return _of_sides(cut, x, basis(cut.height), basis(cut.width))


def inverse(cut: BlockCut, x: jax.Array) -> jax.Array:
    """The leaf of these coefficients."""
    return _of_sides(cut, x, basis(cut.height).T, basis(cut.width).T)


def basis(size: int) -> np.ndarray:
    """The orthonormal DCT-II, float64 [frequencies, places].

    A cosine that is zero is zero here: to a place where all that is sent is zero goes zero,
    whose sign is zero too.
    """
    frequency, place = np.arange(size)[:, None], np.arange(size)
    turns = frequency * (2 * place + 1) % (4 * size)
    cosines = np.where(turns % (2 * size) == size, 0, np.cos(np.pi * turns / (2 * size)))
    return cosines * np.where(frequency == 0, 1, math.sqrt(2)) / math.sqrt(size)


def _of_sides(cut, x, down, across):
    """A product with every block from the left, and with the transpose from the right."""
    blocks = x.reshape(cut.grid)
    exact = lax.Precision.HIGHEST
    if cut.height > 1:
        blocks = jnp.einsum(
            "kh,sdhaw->sdkaw", jnp.asarray(down, x.dtype), blocks, precision=exact
        )
    if cut.width > 1:
        blocks = jnp.einsum(
            "sdhaw,kw->sdhak", blocks, jnp.asarray(across, x.dtype), precision=exact
        )
    return blocks.reshape(x.shape)
