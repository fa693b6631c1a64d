"""Properties of an entered update's leaves that types do not show; from `entry`."""

from collections.abc import Sequence
from typing import NamedTuple


class LeafPlaces(NamedTuple):
    """The properties of an entered update's leaves that types do not show.

    Attributes:
        scatter: For each leaf the dimension along which a rank needs one piece of its sum;
            None if it needs the whole sum.
        axes: For each leaf the mesh axes over which it is sharded, without the ranks'.
        inside: For each leaf the bytes that were sent over axes that are not the ranks'.
    """

    scatter: tuple[int | None, ...]
    axes: tuple[tuple[str, ...], ...]
    inside: tuple[float, ...]

    def cut(self, leaves: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the leaves, of those given, that are cut, each with its dimension."""
        found = ((i, self.scatter[i]) for i in leaves)
        return [(i, at) for i, at in found if at is not None]
