"""A stage of an exchange of listed rows, in one message of one of a few sizes."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class ListStage:
    """One stage: the sizes of its messages, as the program was given them, and its load.

    Attributes:
        sizes: Rows in a message of each size, ascending.
        need: Rows of the fullest message of all ranks.
    """

    sizes: Sequence[int]
    need: int

    @property
    def fits(self) -> bool:
        """Whether the longest message has room."""
        return self.need <= self.sizes[-1]

    @property
    def side(self) -> int:
        """The number of the size that is taken."""
        return sum(size < self.need for size in self.sizes)

    @property
    def rounds(self) -> list[int]:
        """One message, whatever there is."""
        return [self.need]
