"""Deep Gradient Compression: a threshold from a sample, put right while it is far off.

One element in a hundred is looked at, or as many as it takes to see 64 of those wanted; the
last of their largest is the threshold. Where it lets through more than 1.3 or fewer than
0.8 times as many as wanted, it is raised by 1.3 or lowered by 0.8, ten times at most. Where
that does not help, as with numbers that are all the same, the largest go, exactly. Over a
model axis the samples of all shards are put together first, so that all shards of a
tensor share one threshold (Zen, section 3.4).
"""

import dataclasses
import math

import jax.numpy as jnp

from sparsejax import errors
from sparsejax.sparsifiers import base
from sparsejax.units import magnitudes


SEEN = 64  # of the elements wanted, in the sample


@dataclasses.dataclass(frozen=True)
class DGC(base.ByMagnitude):
    """All elements from a threshold on that a sample tells.

    Attributes:
        sample: The share of elements that is looked at.
        lower: Below so many times as many as wanted, the threshold is lowered.
        upper: Above so many times as many, it is raised. There is room for as many.
        rounds: How often at most.

    References:
        Lin et al., Deep Gradient Compression, ICLR 2018
    """

    sample: float = 0.01
    lower: float = 0.8
    upper: float = 1.3
    rounds: int = 10

    def __post_init__(self):
        super().__post_init__()
        errors.check_density("sample", self.sample)
        errors.check_positive("lower", self.lower, 0, 1)
        errors.check_positive("upper", self.upper, 1)
        errors.check_whole("rounds", self.rounds)

    @property
    def room(self):
        return self.upper

    @property
    def correction(self):
        bounds = self.lower, self.upper
        return base.Correction(*bounds, *bounds, self.rounds)

    def level(self, x, state, draw):
        return sampled(x, draw, self.sample, self.density), state


def sampled(x, draw, share, density):
    """The key from which on, as a sample has it, as many are as large as wanted."""
    least = getattr(density, "density", density)
    least = least if isinstance(least, (int, float)) else 0.001
    size = math.ceil(max(share * x.size, min(SEEN / least, x.size)))
    looked_at = draw.gathered(magnitudes.sample(x, size, draw.seed))
    whole = draw.total(jnp.float32(x.size))
    k = jnp.ceil(draw.wanted * (looked_at.size / whole)).astype(jnp.int32)
    return jnp.maximum(magnitudes.halved(looked_at, k), 1)
