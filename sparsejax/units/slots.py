"""The slots that a rank sends: a set for each part, in ascending order.

A message asks for runs of slots and for counts, and not for how a set is held. `Bits` holds
a bit for each slot of each part. A set may also be held as a sorted list; then nothing of
the order of the parts' widths is needed, and there is no bitmap to send.
"""

from typing import NamedTuple, Protocol

import jax

from sparsejax.axes import varying_axes
from sparsejax.units import bits


class Slots(Protocol):
    """Sets of slots, one a part."""

    @property
    def counts(self) -> jax.Array:
        """int32 [parts]: how many slots each part has."""
        ...

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes over which the sets vary."""
        ...

    @property
    def bitmap(self) -> jax.Array | None:
        """uint32 [parts, words], bit s of a row for slot s; None if the sets are lists."""
        ...

    def run(self, first: jax.Array, length: int) -> jax.Array:
        """int32 [parts, length]: the slots of the ranks from `first` on.

        The rank of a slot is how many slots of its part are below it. Behind the last slot
        of a part there may be any.
        """
        ...

    def below(self, words: jax.Array) -> jax.Array:
        """int32 [parts, k]: how many slots lie in the first words [k] of 32 slots each."""
        ...


class Bits(NamedTuple):
    """Sets of slots as packed bits with an index for their search; see `Bits.of`."""

    sets: bits.BitSets

    @classmethod
    def of(cls, words: jax.Array, lanes: int = 0) -> "Bits":
        """The sets with these bits.

        Args:
            words: uint32 [parts, words], bit s of a row for slot s.
            lanes: How many slots of all parts a run has together; for these the search is
                fastest.
        """
        return cls(bits.bit_sets(words, lanes))

    @property
    def counts(self) -> jax.Array:
        """int32 [parts]: how many slots each part has."""
        return self.sets.counts

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes over which the sets vary."""
        return varying_axes(self.sets.words)

    @property
    def bitmap(self) -> jax.Array:
        """uint32 [parts, words], bit s of a row for slot s."""
        return self.sets.words

    def run(self, first: jax.Array, length: int) -> jax.Array:
        """int32 [parts, length]: the slots of the ranks from `first` on."""
        return bits.slots(self.sets, first, length)

    def below(self, words: jax.Array) -> jax.Array:
        """int32 [parts, k]: how many slots lie in the first words [k] of 32 slots each."""
        return bits.count_below(self.sets, words)
