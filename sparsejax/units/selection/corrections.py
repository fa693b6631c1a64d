"""Corrects estimated thresholds, until each selects about k elements.

A threshold that selects too many elements is raised by a factor, one that selects too few
is lowered, and the selection is made again, a few times at most. If too few are selected
after all corrections, as with elements that are all equal, all non-zeros are selected.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.types import as_varying, varying_axes
from sparsejax.units.selection import magnitudes
from sparsejax.units.selection.selections import Arrays, Selection


class Correction(NamedTuple):
    """How an estimated threshold is corrected until it selects about k elements.

    Attributes:
        fewest: The least accepted count, as a multiple of k.
        most: The largest accepted count, as a multiple of k.
        lower: The factor on a threshold that selects too few.
        higher: The factor on a threshold that selects too many.
        rounds: The largest number of corrections; each reads the array once.
    """

    fewest: float
    most: float
    lower: float
    higher: float
    rounds: int

    def __call__(
        self,
        together: Arrays,
        levels: Sequence[jax.Array],
        selected: Selection,
        wanted: jax.Array,
        shards: magnitudes.Shards,
    ) -> tuple[Selection, jax.Array]:
        """Corrects thresholds, one for each array, and what they select.

        Args:
            together: The arrays.
            levels: Their thresholds, as keys.
            selected: The selections by these thresholds.
            wanted: int32 [arrays], k of each.
            shards: The shards of the arrays.

        Returns:
            The selection by the corrected thresholds, and these thresholds, as keys.
        """
        dtype = together.arrays[0].dtype

        def rejected(state):
            return (state.counts < self.fewest * wanted) | (
                state.counts > self.most * wanted
            )

        def pending(state):
            # If the last threshold selects too few, as with elements that are all equal,
            # all non-zeros are selected, of which as many of the largest as fit are kept.
            # Otherwise these elements would never be sent.
            last = (state.turns == self.rounds) & (state.counts < self.fewest * wanted)
            return (rejected(state) & (state.turns < self.rounds)) | last

        def key(state, i):
            many = state.counts[i] > self.most * wanted[i]
            moved = state.thresholds[i] * jnp.where(many, self.higher, self.lower)
            moved = magnitudes.key_of(moved, dtype)
            moved = jnp.where(state.turns[i] < self.rounds, moved, jnp.ones_like(moved))
            new = magnitudes.magnitude_of(moved, dtype)
            return moved, state._replace(thresholds=state.thresholds.at[i].set(new))

        def counted(state, i, count):
            counts = state.counts.at[i].set(shards.add(count))
            return state._replace(counts=counts, turns=state.turns.at[i].add(1))

        thresholds = magnitudes.magnitude_of(jnp.stack(levels), dtype)
        turns = jnp.zeros(len(levels), jnp.int32)
        start = _Turns(turns, thresholds, shards.add(selected.counts))
        over = frozenset().union(*map(varying_axes, (*start, wanted)))
        start = as_varying(start, over)
        selected, state = together.corrected(selected, start, pending, key, counted)
        return selected, magnitudes.key_of(state.thresholds, dtype)


class _Turns(NamedTuple):
    """The state of a correction.

    Attributes:
        turns: int32 [arrays], the number of corrections of each threshold.
        thresholds: [arrays], the thresholds as magnitudes.
        counts: int32 [arrays], the number of elements of all shards that they select.
    """

    turns: jax.Array
    thresholds: jax.Array
    counts: jax.Array
