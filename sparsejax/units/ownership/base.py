"""The protocol of ownership: which rank serves which unit, and where in that rank's part.

An `Ownership` laid over `size` units and `ranks` ranks gives a layout: a bijection between
units and pairs (part, slot), all parts of one width. Balance decides what a scheme costs,
because every buffer is as long as the fullest part needs: for a set of m units a hash gives
at most m/n + O(sqrt(m log(n) / n)) to a part, whatever the set is (Zen, Theorem 2).
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Layout(abc.ABC):
    """A bijection between `size` units and (part, slot), for `ranks` parts.

    Attributes:
        size: How many units there are.
        ranks: How many parts.
        width: How many slots a part has, a multiple of 32; some belong to no unit.
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
        """The part and the slot of each unit."""

    @abc.abstractmethod
    def invert(self, parts: jax.Array, slots: jax.Array) -> jax.Array:
        """The unit of each slot; at least `size` where the slot belongs to none."""

    @property
    def units_of(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """`invert`, as what kernels know where they know it."""
        return self.invert

    @abc.abstractmethod
    def split(self, flags: jax.Array) -> jax.Array:
        """Booleans [size] as packed bits by part, uint32 [ranks, width / 32]."""

    @abc.abstractmethod
    def join(self, dense: jax.Array) -> jax.Array:
        """Values by part [ranks, width, ...] in the order of the units [size, ...]."""


class Ownership(abc.ABC):
    """A rule that gives every unit to a rank. Frozen and hashable."""

    #: Whether `tables` returns anything.
    needs_tables: bool = False

    #: Whether any set is spread evenly, so that the fullest part is hardly fuller than the
    #: mean one.
    balanced: bool = True

    #: The share of the units that memories have room for in which units find their owners;
    #: None if a set is split by the layout.
    memory: float | None = None

    @abc.abstractmethod
    def over(self, size: int, ranks: int, tables: Any = None) -> Layout:
        """Lays the rule over `size` units and `ranks` ranks.

        Args:
            size: How many units there are.
            ranks: How many ranks.
            tables: Those of `tables`; made here if None.
        """

    def tables(self, size: int, ranks: int) -> Any:
        """Arrays that the layout needs, to be kept in a scheme's state."""
        del size, ranks
        return ()

    def width(self, size: int, ranks: int) -> int:
        """How many slots a part has."""
        return self.over(size, ranks).width
