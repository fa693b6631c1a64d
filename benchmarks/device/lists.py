"""A stage of an exchange of listed rows: one message of one of a few sizes, or runs."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class ListStage:
    """One stage: the sizes of its messages, as the program was given them, and its load.

    Attributes:
        sizes: Rows in a message of each size, ascending.
        need: Rows of the fullest message of all ranks.
        run: Rows that are sent at a time; a message at once if None.
    """

    sizes: Sequence[int]
    need: int
    run: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the longest message has room."""
        return self.need <= self.sizes[-1]

    @property
    def side(self) -> int:
        """The number of the size that is taken."""
        return sum(size < self.need for size in self.sizes)

    @property
    def collectives(self) -> int:
        """How many collectives with entries follow one another."""
        return 1 if self.run is None else -(-self.sizes[self.side] // self.run)
