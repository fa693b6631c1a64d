"""QSGD: rounds each element at random to one of a few levels of the norm.

An element is rounded up or down so that the expectation of the result is the element. The
variance may be a multiple of the squared norm. If rounding errors are fed back, the sent
values are divided by one plus that multiple, which keeps the residual bounded. It is for
comparison only: the rounded elements are sent as floating-point numbers, and not packed
into the few bits that they need.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels import hashing
from sparsejax import arguments
from sparsejax.sparsifiers import base


@dataclasses.dataclass(frozen=True)
class QSGD(base.Rounding):
    """Rounds each element at random to a level of the norm, without bias.

    With u uniform in [0, 1), and s the number of levels, an element x_i is rounded to

        sign(x_i) floor(s |x_i| / norm(x) + u) norm(x) / s

    whose expectation is x_i. A leaf of float32 whose norm is below 1e-19 is rounded to 0.
    For comparison only: the rounded elements are sent as floating-point numbers, not in few
    bits.

    Attributes:
        density: Not used: all elements are sent.
        levels: The number of levels beside zero, for either sign.

    Example:
        >>> rounded = sparsejax.sparsify(sparsejax.sparsifiers.QSGD(levels=8))
        >>> tx = optax.chain(rounded, sparsejax.zen_sync(), optax.sgd(0.1))

    References:
        Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and
        Encoding, NIPS 2017
    """

    density: base.Density = 1.0
    levels: int = 16

    def __post_init__(self):
        super().__post_init__()
        arguments.check_whole("levels", self.levels, 1)

    def shrink(self, size):
        variance = min(size / self.levels**2, size**0.5 / self.levels)
        return 1 / (1 + variance)

    def rounded(self, x, draw):
        norm = jnp.sqrt(draw.over.add(jnp.sum(x * x)))
        scaled = jnp.abs(x) / jnp.where(norm > 0, norm, 1) * self.levels
        # Ranks draw different numbers, so that their errors do not add up.
        seed = hashing.mix32(jnp.asarray(draw.rank, jnp.uint32), draw.seed)
        drawn = hashing.mix32(lax.iota(jnp.uint32, x.size), seed)
        uniform = (drawn >> 8).astype(x.dtype) * 2.0**-24
        level = jnp.floor(scaled)
        level = level + (uniform < scaled - level)
        return jnp.sign(x) * level * (norm / self.levels)
