"""MSTopK: a threshold between the mean and the largest magnitude, by binary search.

A fixed number of halvings gives two thresholds: one selects at most k elements, the other
at least k. All elements that reach the higher threshold are selected. Of the elements
between the two, consecutive ones are selected, as many as make k in total, from a start
that changes from step to step. Each halving reads the array once.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from sparsejax import arguments
from sparsejax.axes import as_varying, varying_axes
from sparsejax.sparsifiers import base
from sparsejax.units import bits
from sparsejax.units.selection import magnitudes


@dataclasses.dataclass(frozen=True)
class MSTopK(base.Selector):
    """Selects k elements that are nearly the largest, by a binary search for the threshold.

    The search begins between the mean and the largest magnitude. All elements that reach
    the higher of the last two thresholds are selected. Of those between the two a run fills
    up to k elements; its start changes from step to step.

    Attributes:
        density: The share of elements to send, k of the size: a number, a `Warmup` or a
            `Schedule`.
        halvings: The number of steps of the search. Each one reads the array once.

    Example:
        >>> nearly = sparsejax.sparsify(sparsejax.sparsifiers.MSTopK(0.01, halvings=20))
        >>> tx = optax.chain(nearly, sparsejax.zen_sync(), optax.sgd(0.1))

    References:
        Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud
        Clusters, MLSys 2021

    See Also:
        `sparsejax.sparsifiers.TopK`: the k largest exactly.
        `sparsejax.schemes.GTopk`: the k largest of a sum over ranks.
    """

    halvings: int = 30

    def __post_init__(self):
        super().__post_init__()
        arguments.check_whole("halvings", self.halvings, 1)

    def select(self, x, state, draw, capacity):
        shards = draw.over
        # NaN and infinity are above any threshold and would make the mean infinite.
        magnitude = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
        elements = shards.add(jnp.asarray(x.size, x.dtype))
        mean = shards.add(jnp.sum(magnitude)) / elements
        top = jnp.max(shards.join(jnp.max(magnitude, initial=0)[None]))
        counted = lambda t: shards.add(magnitudes.count(x, magnitudes.key_of(t, x.dtype)))

        def halve(_, state):
            high, low = state  # Thresholds that select at most k, and more than k.
            middle = high + (low - high) / 2
            too_many = counted(middle) > draw.wanted
            return jnp.where(too_many, high, middle), jnp.where(too_many, middle, low)

        # If at most k elements are above the mean, the threshold lies below it.
        low = jnp.where(counted(mean) > draw.wanted, mean, 0)
        axes = varying_axes(low) | varying_axes(top)
        high, low = lax.fori_loop(0, self.halvings, halve, as_varying((top, low), axes))
        high, low = (magnitudes.key_of(t, x.dtype) for t in (high, low))
        if draw.over.count == 1:
            words = magnitudes.with_ties(x, high, low, draw.wanted, draw.seed)
            count = bits.members(words)
        else:  # A shard cannot tell how many between the thresholds would make k.
            words, count = magnitudes.at_least(x, low)
        words = magnitudes.fit(x, words, count, capacity, draw.seed)
        return magnitudes.indices(words, x.size, capacity), state
