"""A stage of an exchange of listed rows: one message of one of a few sizes, or its runs."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class ListStage:
    """A stage: the sizes of its messages in the program, and its load.

    Attributes:
        sizes: The number of rows in a message of each size, ascending.
        need: The number of rows of the fullest message of all ranks.
        run: The number of rows that are sent at a time; if None, a message is sent at once.
    """

    sizes: Sequence[int]
    need: int
    run: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the longest message has capacity for all rows."""
        return self.need <= self.sizes[-1]

    @property
    def side(self) -> int:
        """The index of the smallest size that has capacity for all rows."""
        return sum(size < self.need for size in self.sizes)

    @property
    def collectives(self) -> int:
        """The number of consecutive collectives that send rows."""
        return 1 if self.run is None else -(-self.sizes[self.side] // self.run)
