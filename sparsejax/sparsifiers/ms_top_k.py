"""MSTopK: a threshold between the mean and the largest magnitude, by halving.

After a fixed number of halvings two thresholds are known, one that lets through no more
than wanted and one that lets through no less. All from the first on go, and of those
between the two a run that follow one another, from a place that changes with the step, so
that it is as many as wanted. A halving reads the array once.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from sparsejax import errors
from sparsejax.axes import as_varying, varying_axes
from sparsejax.sparsifiers import base
from sparsejax.units import bits, magnitudes


@dataclasses.dataclass(frozen=True)
class MSTopK(base.Selecting):
    """As many elements as wanted, nearly the largest.

    Attributes:
        halvings: How often the array is read to find the thresholds.

    References:
        Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud
        Clusters, MLSys 2021
    """

    halvings: int = 30

    def __post_init__(self):
        super().__post_init__()
        errors.check_whole("halvings", self.halvings, 1)

    def select(self, x, state, draw, capacity):
        # What is not finite is above any threshold, and says nothing about the others.
        magnitude = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
        whole = draw.total(jnp.asarray(x.size, x.dtype))
        mean = draw.total(jnp.sum(magnitude)) / whole
        top = jnp.max(draw.gathered(jnp.max(magnitude, initial=0)[None]))
        counted = lambda t: draw.total(magnitudes.count(x, magnitudes.key_of(t, x.dtype)))

        def halve(_, state):
            few, many = state  # thresholds that let through too few and too many
            middle = few + (many - few) / 2
            too_many = counted(middle) > draw.wanted
            return jnp.where(too_many, few, middle), jnp.where(too_many, middle, many)

        # Where fewer than wanted are above the mean, zero is what lets enough through.
        low = jnp.where(counted(mean) > draw.wanted, mean, 0)
        axes = varying_axes(low) | varying_axes(top)
        few, many = lax.fori_loop(0, self.halvings, halve, as_varying((top, low), axes))
        few, many = (magnitudes.key_of(t, x.dtype) for t in (few, many))
        if draw.model_axis is None:
            words = magnitudes.filled(x, few, many, draw.wanted, draw.seed)
        else:  # No shard knows which of those between would make as many as wanted.
            words = bits.pack_all(magnitudes.keys(x) >= many)
        count = bits.members(words)
        words = base.fitted(x, words, count, draw, capacity)
        return base.places(words, x.size, capacity), state
