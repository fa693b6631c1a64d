"""PowerSGD: a matrix as the product of two thin ones, by one step of power iteration.

On the wire, for matrices M [n, m] of one shape, r their rank: two dense sums,

    sum of M_i Q       n r numbers, from which an orthonormal basis P [n, r] is computed
    sum of M_i^T P     m r numbers: the next Q, and the total is P Q^T

Both are all-reduces of a fixed size without indices, so it is fast wherever all-reduce is.
The total is the projection of the sum on the columns of P, which are the same on all ranks.
So each rank leaves out M_i - P (M_i^T P)^T, exactly its own part of what is missing. The
paper subtracts the mean of all ranks, which leaves larger residuals. Q is kept for the next
step (the paper's warm start): gradients of successive steps are similar, so over steps the
iteration converges to their largest singular vectors.

A leaf of several axes is cut into rows and columns where their sum is least. A leaf whose
factors are more than half as large as the leaf is summed densely.

The total of a matrix with a number that is not finite is NaN. Nothing is left out then, and
Q stays as it was, so later steps are not affected.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import arguments
from sparsejax.schemes import base
from sparsejax.schemes.forecast import Forecast, Load, agreeing
from sparsejax.units.units import wide
from sparsejax.wire import collectives


_SEED = 0x505347


class PowerSGDState(NamedTuple):
    """State of PowerSGD.

    Attributes:
        right: float32 or wider [matrices, m, r], the Q of each matrix, with columns of
            norm 1 after the first step; the same on all ranks.
    """

    right: jax.Array


@dataclasses.dataclass(frozen=True)
class PowerSGD(base.LossyScheme):
    """Sums matrices as products of two thin ones, by one step of power iteration.

    With M_i the matrix of rank i, and Q [m, rank] kept from the step before:

        P     = orthonormal basis of the columns of sum_i(M_i Q)
        Q     = sum_i(M_i^T P)
        total = P Q^T
        left  = M_i - P (M_i^T P)^T

    Both sums are dense all-reduces. A leaf of several axes is cut into rows and columns
    where their sum is least. A leaf that this does not make half as large is summed
    densely.

    Attributes:
        rank: The number of columns of P and Q; smaller sends less. 1 to 4 suffice for most
            models.

    Example:
        >>> tx = sparsejax.sync(sparsejax.schemes.PowerSGD(rank=2))
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for
        Distributed Optimization, NeurIPS 2019
    """

    unit = "leaf"
    selects = False
    rank: int = 4

    def __post_init__(self):
        arguments.check_whole("rank", self.rank, 1)

    def suits(self, shape):
        # Both factors together must have at most half as many numbers as the leaf.
        n, m = as_matrix(shape)
        return 2 * self.rank * (n + m) <= n * m

    def init(self, like, wire):
        _, m = as_matrix(like.shape[1:])
        shape = like.shape[0], m, self.rank
        return PowerSGDState(
            jax.random.normal(jax.random.key(_SEED), shape, wide(like.dtype))
        )

    def __call__(self, x, state, wire):
        base.check_state(self, state, PowerSGDState)
        if x.size == 0:
            return base.nothing_to_send(x, state, wire)
        n, m = as_matrix(x.shape[1:])
        matrices = x.dense().reshape(-1, n, m)
        left, pushed = wire.psum(_times(matrices, state.right))
        # Householder's QR is orthonormal even where the sum has a lower rank. Matrices
        # that are not finite are replaced: with them some LAPACK libraries do not return.
        finite = jnp.isfinite(left).all((1, 2), keepdims=True)
        basis = jnp.linalg.qr(jnp.where(finite, left, 0))[0]
        mine = _times(matrices.mT, basis)
        right, pulled = wire.psum(mine)
        finite &= jnp.isfinite(right).all((1, 2), keepdims=True)
        # A column of zeros is replaced by the previous one, which is tried again.
        most = jnp.abs(right).max(1, keepdims=True)
        moved = finite & (most > 0)
        # Divided by the largest first: squares of very large or small numbers overflow or
        # underflow.
        ahead = jnp.where(moved, right / jnp.where(moved, most, 1), 1)
        ahead = ahead / jnp.linalg.norm(ahead, axis=1, keepdims=True)
        ahead = jnp.where(moved, ahead, state.right)
        total = jnp.where(finite, _times(basis, right.mT), jnp.nan)
        rest = jnp.where(finite, matrices - _times(basis, mine.mT), 0)
        traffic = base.traffic(
            base.stage(pushed, pushed, 1),
            base.stage(pulled, pulled, 1),
            dense=wire.dense_bytes(x.size, x.dtype),
        )
        total, rest = total.reshape(x.shape), rest.reshape(x.shape)
        return base.Reduced(total, rest, PowerSGDState(ahead), traffic)

    def forecast(self, load: Load) -> Forecast:
        n, m = as_matrix(load.shape)
        matrices = load.size // max(n * m, 1)
        size = matrices * self.rank * wide(load.dtype).itemsize
        halves = (collectives.all_reduce_bytes(size * side, load.ranks) for side in (n, m))
        return Forecast(*halves, messages=4 * agreeing(load.ranks), rounds=2)


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the rows and columns of an array, cut into two where their sum is least."""
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(len(shape) + 1)]
    return min(cuts, key=sum)


def _times(a, b):
    """Multiplies matrices in full precision on every platform."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
