"""Exact top-k: the largest magnitudes, so many of them, whatever it costs to find them.

What the other sparsifiers approximate. Found without a sort; see `magnitudes`.
"""

import dataclasses

import jax.numpy as jnp

from sparsejax.sparsifiers import base
from sparsejax.units import bits, magnitudes


@dataclasses.dataclass(frozen=True)
class TopK(base.ByMagnitude):
    """The largest elements; of equal ones a run whose start changes from step to step."""

    def level(self, x, state, draw):
        return exact(x, draw), state

    def take(self, x, level, draw, capacity):
        if draw.model_axis is not None or not draw.alone:
            return super().take(x, level, draw, capacity)
        # Found here and for this array, more than wanted are equal ones.
        words = magnitudes.filled(x, level + 1, level, draw.wanted, draw.seed)
        count = bits.members(words)
        return base.places(words, x.size, capacity), count


def exact(x, draw):
    """The key of the last element wanted."""
    key = magnitudes.kth_largest(x, draw.wanted, draw.seed, draw.total, draw.gathered)
    return jnp.maximum(key, 1)
