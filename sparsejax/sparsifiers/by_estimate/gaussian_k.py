"""Gaussian-k: a threshold from the standard deviation of normally distributed elements.

Gradients have longer tails than a normal distribution, so the threshold is then changed by
two per cent until it selects between 3/4 k and 5/4 k elements, at most twenty times. If
that does not suffice, the largest elements are selected exactly.
"""

import dataclasses

import jax
import jax.numpy as jnp

from sparsejax import arguments
from sparsejax.sparsifiers.by_estimate.estimate import ByEstimate
from sparsejax.units.selection import magnitudes
from sparsejax.units.selection.corrections import Correction


@dataclasses.dataclass(frozen=True)
class GaussianK(ByEstimate):
    """Selects all elements that reach a quantile of the normal distribution.

    With s the root mean square of the elements, and Q the quantile function of the standard
    normal distribution, the threshold is

        s Q(1 - k / (2 size))

    Gradients have longer tails than that. So the threshold is multiplied or divided by
    `step` until it selects between 3/4 k and 5/4 k elements, at most `rounds` times. If
    that does not suffice, the largest are selected exactly.

    Attributes:
        density: The share of elements to send, k of the size: a number, a `Warmup` or a
            `Schedule`.
        step: The factor of a correction, above 1.
        rounds: The largest number of corrections.

    Example:
        >>> gaussian = sparsejax.sparsify(sparsejax.sparsifiers.GaussianK(0.01))
        >>> tx = optax.chain(gaussian, sparsejax.zen_sync(), optax.sgd(0.1))

    References:
        Shi et al., Understanding Top-k Sparsification in Distributed Deep Learning, arXiv
        1911.08772
    """

    step: float = 1.02
    rounds: int = 20

    def __post_init__(self):
        super().__post_init__()
        arguments.check_positive("step", self.step, 1)
        arguments.check_whole("rounds", self.rounds)

    @property
    def room(self):
        return 1.25

    @property
    def correction(self):
        return Correction(0.75, 1.25, 1 / self.step, self.step, self.rounds)

    def level(self, x, state, draw):
        # NaN and infinity are above any threshold and would make the deviation infinite.
        finite = jnp.where(jnp.isfinite(x), x, 0)
        elements = draw.over.add(jnp.asarray(x.size, x.dtype))
        deviation = jnp.sqrt(draw.over.add(jnp.sum(finite * finite)) / elements)
        share = draw.wanted.astype(x.dtype) / elements
        threshold = deviation * jax.scipy.stats.norm.ppf(1 - share / 2)
        return magnitudes.key_of(threshold, x.dtype), state
