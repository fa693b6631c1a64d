"""Gauss's quadrature: replaces a sum of many fractions by one of six."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax.axes import as_varying, varying_axes


NODES = 6


def quadrature(weights: jax.Array, points: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `NODES` weights and points of a sum of fractions w / (r x + 1), for all r.

    It is Gauss's quadrature for the measure w / x, so that sums for large r are exact.
    Points lie close to each other, so they are computed relative to the first one.

    Args:
        weights: float32 [k, terms], w of each term of k sums; zero for no term.
        points: float32 [k, terms], x of each term.

    Returns:
        The weights and the points, each [k, `NODES`].
    """
    first = points[:, :1]
    place, measure = points / first - 1, weights / points
    sign = jnp.where(measure.sum(1, keepdims=True) < 0, -1.0, 1.0)
    measure = measure * sign
    total = measure.sum(1, keepdims=True)
    # Without a term the place is arbitrary, and its powers could overflow.
    place = jnp.where(measure > 0, place, 0)
    before = jnp.zeros_like(place)
    now = jnp.where(measure > 0, lax.rsqrt(jnp.where(total > 0, total, 1)), 0)
    inner, outer = [], [jnp.zeros_like(total)]
    for _ in range(NODES):
        middle = (measure * place * now * now).sum(1, keepdims=True)
        rest = (place - middle) * now - outer[-1] * before
        length = jnp.sqrt((measure * rest * rest).sum(1, keepdims=True))
        inner.append(middle)
        outer.append(length)
        # With no more distinct points than iterations so far the residual is zero.
        before, now = now, jnp.where(length > 0, rest / jnp.where(length > 0, length, 1), 0)
    inner, outer = jnp.concatenate(inner, 1), jnp.concatenate(outer[1:-1], 1)
    # The matrix is made by products: a scatter for each diagonal would be a kernel more.
    on, above = np.eye(NODES, dtype=np.float32), np.eye(NODES, k=1, dtype=np.float32)
    outer = jnp.pad(outer, [(0, 0), (0, 1)])[:, :, None] * above
    matrix = inner[:, :, None] * on + outer + outer.swapaxes(1, 2)
    at, share = eigen(matrix)
    at = first * (1 + at)
    return sign * total * share**2 * at, at


# A permutation of six indices, paired as (0, 1), (2, 3), (4, 5): in five turns each index
# is paired with each other one.
_TURN = np.array([0, 3, 1, 5, 2, 4], np.int32)
_SWEEPS = 6


def eigen(matrices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the eigenvalues of symmetric matrices [k, 6, 6], and first components.

    The latter are the first component of each normalized eigenvector. Both are computed by
    Jacobi's rotations, of three pairs at a time. `jnp.linalg.eigh` hangs if several devices
    of a CPU call it at once: JAX's kernel (0.10 to 0.12) hands parts of a batch to the
    threads on which all of them wait.
    """
    k, n = matrices.shape[:2]
    # The batch is the last axis, so that CPUs vectorize over it.
    same = np.eye(n // 2, dtype=bool)[:, None, :, None, None]

    def turn(_, state):
        a, first = state
        blocks = jnp.where(same, a.reshape(n // 2, 2, n // 2, 2, k), 0).sum(2)
        off = blocks[:, 0, 1]
        ratio = (blocks[:, 1, 1] - blocks[:, 0, 0]) / jnp.where(off == 0, 1, 2 * off)
        tangent = jnp.where(ratio < 0, -1, 1) / (jnp.abs(ratio) + jnp.sqrt(ratio**2 + 1))
        tangent = jnp.where(off == 0, 0, tangent)
        cosine = lax.rsqrt(tangent**2 + 1)
        sine = tangent * cosine

        def rotated(x):
            """Rotates pairs of rows [3, 2, ..., k], each by its angle."""
            c, s = (y.reshape(n // 2, *[1] * (x.ndim - 3), k) for y in (cosine, sine))
            one, other = x[:, 0], x[:, 1]
            x = jnp.stack([c * one - s * other, s * one + c * other], axis=1)
            return x.reshape(n, *x.shape[2:])[_TURN]

        a = rotated(a.reshape(n // 2, 2, n, k)).swapaxes(0, 1)
        a = rotated(a.reshape(n // 2, 2, n, k))
        return a, rotated(first.reshape(n // 2, 2, k))

    first = jnp.zeros((n, k), matrices.dtype).at[0].set(1)
    first = as_varying(first, varying_axes(matrices))
    start = jnp.moveaxis(matrices, 0, -1), first
    a, first = lax.fori_loop(0, _SWEEPS * (n - 1), turn, start)
    return jnp.where(np.eye(n, dtype=bool)[..., None], a, 0).sum(1).T, first.T
