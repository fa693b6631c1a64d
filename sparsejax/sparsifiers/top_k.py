"""Exact top-k: the largest magnitudes, so many of them, whatever it costs to find them.

What the other sparsifiers approximate. Found without a sort; see `magnitudes`.
"""

import dataclasses

import jax.numpy as jnp

from sparsejax import magnitudes
from sparsejax.sparsifiers import base


@dataclasses.dataclass(frozen=True)
class TopK(base.ByMagnitude):
    """The largest elements; of equal ones a run whose start changes from step to step."""

    def level(self, x, state, draw):
        key = exact(x, draw)
        return key, state


def exact(x, draw):
    """The key of the last element wanted."""
    key = magnitudes.kth_largest(x, draw.wanted, draw.seed, draw.total, draw.gathered)
    return jnp.maximum(key, 1)
