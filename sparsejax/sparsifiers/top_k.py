"""Exact top-k: the k largest magnitudes, which the other sparsifiers approximate.

The threshold is found without a sort; see `units.magnitudes`.
"""

import dataclasses

from sparsejax.sparsifiers import base
from sparsejax.units import bits, magnitudes


@dataclasses.dataclass(frozen=True)
class TopK(base.ByMagnitude):
    """Selects the k largest elements; of equal ones a run whose start changes by step."""

    def level(self, x, state, draw):
        return magnitudes.threshold(x, draw.wanted, draw.seed, draw.over), state

    def take(self, x, level, draw, capacity):
        if draw.model_axis is not None or not draw.alone:
            return super().take(x, level, draw, capacity)
        # The threshold is that of this array, so if it selects more than k, these are ties.
        words = magnitudes.with_ties(x, level + 1, level, draw.wanted, draw.seed)
        count = bits.members(words)
        return magnitudes.indices(words, x.size, capacity), count
