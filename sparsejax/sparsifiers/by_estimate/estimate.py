"""The contract of a sparsifier whose threshold is an estimate.

An estimate may select far more or far fewer elements than k. The threshold and its
selection are then corrected (`units.selection.corrections`).
"""

import abc

import jax.numpy as jnp

from sparsejax.sparsifiers import base
from sparsejax.units.selection.corrections import Correction
from sparsejax.units.selection.selections import Arrays


class ByEstimate(base.ByMagnitude):
    """A sparsifier that estimates a threshold, and corrects it while it is far off.

    A subclass defines `level`, which estimates the threshold, and `correction`.

    Attributes:
        density: The share of elements to send, k of the size: a number, a `Warmup` or a
            `Schedule`.

    Example:
        >>> estimate = sparsejax.sparsifiers.by_estimate.estimate
        >>> isinstance(sparsejax.sparsifiers.DGC(0.01), estimate.ByEstimate)
        True
    """

    @property
    @abc.abstractmethod
    def correction(self) -> Correction:
        """The rule by which the threshold is corrected."""

    def settled(self, x, level, draw):
        return self._corrected(Arrays([x]), [level], [draw])[1][0]

    def _take_settled(self, arrays, levels, draws, capacities):
        together = Arrays(arrays)
        selected, levels = self._corrected(together, levels, draws)
        places = self._fit(together, list(levels), selected, draws, capacities)
        return places, selected.counts

    def _corrected(self, together, levels, draws):
        """Returns the selections by corrected thresholds, and these thresholds."""
        wanted = jnp.stack([draw.wanted for draw in draws])
        # The selection also counts, so most steps read the arrays only once.
        selected = together.at_least(levels)
        return self.correction(together, levels, selected, wanted, draws[0].over)
