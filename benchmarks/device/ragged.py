"""A stage of an exchange whose messages are as long as what is there, for a load.

How long they are is not in the program, whose buffers have room for more: it follows from
the load, by the library's own form of a message.
"""

import dataclasses
import functools

import numpy as np

from benchmarks.device.walk import Ragged
from sparsejax.wire.ragged import Form


@dataclasses.dataclass(frozen=True)
class RaggedStage:
    """One stage of an exchange: its form of a message, and its load.

    Attributes:
        form: Where the parts of a message are, as the program was given it.
        packed: int [ranks, parts]: entries of each part that a rank sends; one part that
            goes to all, or one for each rank.
        unpacked: int [ranks, sources]: entries that a rank receives of each.
        dense: Bytes of a rank where this stage goes densely instead.
        rest: Bytes that are reckoned with beside this stage's before it is chosen.
    """

    form: Form
    packed: np.ndarray
    unpacked: np.ndarray
    dense: float
    rest: float = 0.0

    @property
    def need(self) -> int:
        """Entries of the fullest part of all ranks."""
        return int(self.packed.max())

    @functools.cached_property
    def rounds(self) -> list[int]:
        """Of each round the entries of the fullest part."""
        room = self.form.room
        return [min(room, self.need - first) for first in range(0, self.need, room)]

    @property
    def collectives(self) -> int:
        """How many collectives with entries follow one another."""
        return len(self.rounds)

    @property
    def operands(self) -> tuple[int, int]:
        """Words that a program gives a collective of this stage: what is sent, and room."""
        return self.packed.shape[1] * self.form.words, self.form.rows * self.form.words

    @property
    def side(self) -> int:
        """Of one switch: nothing, one round or several."""
        return min(len(self.rounds), 2)

    def _bytes(self, counts):
        return np.vectorize(lambda count: self.form.mean_bytes(int(count)))(counts)

    @functools.cached_property
    def sent(self) -> float:
        """Bytes to others in all rounds, of the rank that sends most."""
        each = self._bytes(self.packed)
        if each.shape[1] == 1:
            return (self.form.rows - 1) * float(each.max())
        return float((each.sum(1) - np.diagonal(each)).max())

    @property
    def pays(self) -> bool:
        """Whether entries take fewer bytes than the dense way out."""
        return self.sent + self.rest < self.dense

    @property
    def collective(self) -> Ragged:
        """One round's collective, on average: what it sends, reads and writes."""
        rounds = max(len(self.rounds), 1)
        read = self._bytes(self.packed).sum(1).max()
        written = self._bytes(self.unpacked).sum(1).max()
        return Ragged(self.sent / rounds, float(read) / rounds, float(written) / rounds)
