"""QSGD: every number as one of a few levels of the norm, rounded at random.

Up or down is drawn so that the mean is the number itself. The variance may be many times
the square of the norm; with a memory what goes is therefore less by one and that many
times, which is what makes the memory stay bounded. For comparison: what follows
sends the rounded numbers as numbers; the few bits that they would need are not packed.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels import hashing
from sparsejax import errors
from sparsejax.sparsifiers import base


@dataclasses.dataclass(frozen=True)
class QSGD(base.Rounding):
    """Levels of the norm, unbiased; `density` is not used.

    Attributes:
        levels: How many there are beside zero, for either sign.

    References:
        Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and
        Encoding, NIPS 2017
    """

    density: base.Density = 1.0
    levels: int = 16

    def __post_init__(self):
        super().__post_init__()
        errors.check_whole("levels", self.levels, 1)

    def shrink(self, size):
        variance = min(size / self.levels**2, size**0.5 / self.levels)
        return 1 / (1 + variance)

    def rounded(self, x, draw):
        norm = jnp.sqrt(draw.total(jnp.sum(x * x)))
        scaled = jnp.abs(x) / jnp.where(norm > 0, norm, 1) * self.levels
        # Ranks round apart, so that their errors do not add up.
        seed = hashing.mix32(jnp.asarray(draw.rank, jnp.uint32), draw.seed)
        drawn = hashing.mix32(lax.iota(jnp.uint32, x.size), seed)
        chance = (drawn >> 8).astype(x.dtype) * 2.0**-24
        whole = jnp.floor(scaled)
        whole = whole + (chance < scaled - whole)
        return jnp.sign(x) * whole * (norm / self.levels)
