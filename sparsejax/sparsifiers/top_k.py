"""Exact top-k: selects the k largest magnitudes, which other sparsifiers approximate.

The threshold is found without a sort; see `units.selection.magnitudes`.
"""

import dataclasses

from sparsejax.sparsifiers import base
from sparsejax.units.selection import magnitudes


@dataclasses.dataclass(frozen=True)
class TopK(base.ByMagnitude):
    """Selects the k elements of the largest magnitudes.

    The threshold is exact, and is found without a sort. Of elements that are equal to it, a
    run is selected whose start changes from step to step.

    Attributes:
        density: The share of elements to send, k of the size: a number, a `Warmup` or a
            `Schedule`.

    Example:
        >>> largest = sparsejax.sparsify(sparsejax.sparsifiers.TopK(0.01), global_=True)
        >>> tx = optax.chain(largest, sparsejax.zen_sync(), optax.sgd(0.1))

    References:
        Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017

    See Also:
        `sparsejax.sparsifiers.MSTopK`: nearly the k largest, by a binary search.
        `sparsejax.schemes.GTopk`: the k largest of a sum over ranks.
    """

    def level(self, x, state, draw):
        return magnitudes.threshold(x, draw.wanted, draw.seed, draw.over), state

    def limit(self, draw, capacity):
        return draw.wanted if _is_exact(draw) else capacity

    def cut(self, x, level, limit, draw):
        if not _is_exact(draw):
            return super().cut(x, level, limit, draw)
        return magnitudes.with_ties(x, level + 1, level, limit, draw.seed)


def _is_exact(draw):
    """Returns whether the threshold selects k elements of this array, except for ties."""
    return draw.alone and draw.over.count == 1
