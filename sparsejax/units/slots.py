"""The slots that a rank sends: a set for each part, as packed bits.

A message asks for the slots of a part in ascending order, a run at a time, or all at once.
They are found by the counts of `bits.rank_index`, which the packing side makes of the
words.
"""

from typing import NamedTuple

import jax

from sparsejax.axes import varying_axes
from sparsejax.units import bits


class Slots(NamedTuple):
    """Sets of slots, one a part; see `Slots.of`.

    Attributes:
        words: uint32 [parts, words], bit s of a row for slot s.
        counts: int32 [parts]: how many slots each part has.
    """

    words: jax.Array
    counts: jax.Array

    @classmethod
    def of(cls, words: jax.Array) -> "Slots":
        """The sets with these bits: uint32 [parts, words]."""
        return cls(words, bits.members_of_each(words))

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes over which the sets vary."""
        return varying_axes(self.words)
