"""Gaussian-k: a threshold from the spread, as if the elements were normally distributed.

Gradients are not, having longer tails, so the threshold is then moved by two per cent until
between 3/4 and 5/4 as many as wanted are as large, twenty times at most. Where that does
not help, the largest go, exactly.
"""

import dataclasses

import jax
import jax.numpy as jnp

from sparsejax import errors
from sparsejax.sparsifiers import base
from sparsejax.units import magnitudes


@dataclasses.dataclass(frozen=True)
class GaussianK(base.ByMagnitude):
    """All elements from a quantile of the normal distribution on.

    Attributes:
        step: By how much the threshold is moved.
        rounds: How often at most.
    """

    step: float = 1.02
    rounds: int = 20

    def __post_init__(self):
        super().__post_init__()
        errors.check_positive("step", self.step, 1)

    @property
    def room(self):
        return 1.25

    @property
    def correction(self):
        return base.Correction(0.75, 1.25, 1 / self.step, self.step, self.rounds)

    def level(self, x, state, draw):
        # What is not finite is above any threshold, and says nothing about the others.
        finite = jnp.where(jnp.isfinite(x), x, 0)
        whole = draw.total(jnp.asarray(x.size, x.dtype))
        spread = jnp.sqrt(draw.total(jnp.sum(finite * finite)) / whole)
        share = draw.wanted.astype(x.dtype) / whole
        start = spread * jax.scipy.stats.norm.ppf(1 - share / 2)
        return magnitudes.key_of(start, x.dtype), state
