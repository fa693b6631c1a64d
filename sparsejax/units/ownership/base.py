"""The protocol of ownership: the owner of each unit, and its slot in the owner's part.

For `size` units and `ranks` ranks an `Ownership` makes a layout: a map of units to pairs
(part, slot), in which all parts have one width. Balance determines the cost of a scheme,
because every buffer is as long as the fullest part: of a set of m units a hash assigns at
most m/n + O(sqrt(m log(n) / n)) to a part, whatever the set is (Zen, Theorem 2).
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Layout(abc.ABC):
    """A one-to-one map of `size` units to pairs (part, slot), for `ranks` parts.

    Attributes:
        size: The number of units.
        ranks: The number of parts.
        width: The number of slots of a part, a multiple of 32; some belong to no unit.
    """

    size: int
    ranks: int
    width: int

    @property
    def memory(self) -> Any:
        """The `PartMemory` in which units find their owners; None if `split` finds them."""
        return None

    @abc.abstractmethod
    def assign(self, units: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the part and the slot of each unit."""

    @abc.abstractmethod
    def invert(self, parts: jax.Array, slots: jax.Array) -> jax.Array:
        """Returns the unit of each slot; `size` or more for a slot of no unit."""

    @property
    def units_of(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """`invert`, as a `Striping` where kernels can compute it themselves."""
        return self.invert

    @abc.abstractmethod
    def split(self, flags: jax.Array) -> jax.Array:
        """Packs booleans [size] into bits by part, uint32 [ranks, width / 32]."""

    @abc.abstractmethod
    def join(self, dense: jax.Array) -> jax.Array:
        """Reorders values by part, [ranks, width, ...], by units, [size, ...]."""


class Ownership(abc.ABC):
    """A rule that assigns each unit to a rank. Frozen and hashable."""

    #: Whether the layout needs the arrays of `tables`.
    needs_tables: bool = False

    #: Whether any set is distributed evenly, so that the fullest part is hardly fuller than
    #: the mean.
    balanced: bool = True

    #: The capacity of part memories as a share of the units; None if the layout splits
    #: sets, without part memories.
    memory: float | None = None

    @abc.abstractmethod
    def over(self, size: int, ranks: int, tables: Any = None) -> Layout:
        """Returns the layout of `size` units over `ranks` ranks.

        Args:
            size: The number of units.
            ranks: The number of ranks.
            tables: The arrays of `tables`; computed here if None.
        """

    def tables(self, size: int, ranks: int) -> Any:
        """Returns the arrays that the layout needs, to keep them in a scheme's state."""
        del size, ranks
        return ()

    def width(self, size: int, ranks: int) -> int:
        """Returns the number of slots of a part."""
        return self.over(size, ranks).width
