"""The cosine transform of blocks, whose largest coefficients are sent, as in DeMo.

Nothing is sent here. A leaf is cut by `blocks.BlockCut`, and each block X of height x width
elements is transformed into as many coefficients, which replace it,

    C = D(height) X D(width)^T    and back    X = D(height)^T C D(width)

with D the orthonormal DCT-II, so D D^T = 1: two products with matrices of at most 64 rows.
The transform is linear. So the inverse transform of the coefficients that were not sent is
the part of the block that was not sent:

    x - inverse(sent) == inverse(forward(x) - sent)

All ranks apply the inverse to the same sum, with the same program, so replicas stay equal
if their devices multiply matrices in the same order: devices of one kind.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax.chunked.blocks import BlockCut


def forward(cut: BlockCut, x: jax.Array) -> jax.Array:
    """Returns the coefficients of a leaf, in its shape; each block is transformed."""
    return _of_sides(cut, x, basis(cut.height), basis(cut.width))


def inverse(cut: BlockCut, x: jax.Array) -> jax.Array:
    """Returns the leaf with given coefficients: the inverse of `forward`."""
    return _of_sides(cut, x, basis(cut.height).T, basis(cut.width).T)


def basis(size: int) -> np.ndarray:
    """Returns the matrix of the orthonormal DCT-II, float64 [frequencies, places].

    Cosines that are zero are exactly zero, without rounding errors. So an element at which
    the cosines of all sent coefficients are zero is exactly zero, and so is its sign.
    """
    frequency, place = np.arange(size)[:, None], np.arange(size)
    turns = frequency * (2 * place + 1) % (4 * size)
    cosines = np.where(turns % (2 * size) == size, 0, np.cos(np.pi * turns / (2 * size)))
    return cosines * np.where(frequency == 0, 1, math.sqrt(2)) / math.sqrt(size)


def _of_sides(cut, x, down, across):
    """Multiplies every block by `down` from the left, and `across.T` from the right."""
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
