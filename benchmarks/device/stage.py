"""A stage of an exchange of entries: its rounds and bytes for a load, by its ladder."""

import dataclasses
import functools

import numpy as np

from sparsejax.wire.ladder import Ladder


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of an exchange: its ladder in the program, and its load.

    Attributes:
        ladder: The message sizes.
        messages: The number of messages that a rank sends in a round.
        packed: int [ranks, parts]: the entries of each part that a rank sends.
        unpacked: int [ranks, sources]: the entries that a rank receives from each source.
        dense: The bytes that a rank sends if this stage is dense instead.
        rest: Bytes beyond this stage that count for entries when the choice is made.
        overhead: The bytes that entries must save to be chosen: see `collectives.pays`.
        pieces: For each rung the number of pieces in which a message is received; if None,
            messages are received whole.
        groups: The branches that each program unpacks, if they are divided among several
            programs: see `at_once.groups`.
        in_turn: The number of kernel launches that add a message, or a piece: one for each
            sender if the sum is ordered.
    """

    ladder: Ladder
    messages: int
    packed: np.ndarray
    unpacked: np.ndarray
    dense: float
    rest: float = 0.0
    overhead: float = 0.0
    pieces: tuple[int, ...] | None = None
    in_turn: int = 1
    groups: tuple[range, ...] = ()

    @property
    def need(self) -> int:
        """The number of entries of the fullest part of all ranks."""
        return int(self.packed.max())

    @functools.cached_property
    def rounds(self) -> list[tuple[int, int]]:
        """For each round the index of its rung, and the entries of a part that it sends."""
        rounds, first = [], 0
        for rung in self.ladder.messages_for(self.need, self.messages):
            length = min(self.need - first, rung.capacity)
            rounds.append((self.ladder.rungs.index(rung), length))
            first += length
        return rounds

    @property
    def collectives(self) -> int:
        """The number of consecutive collectives that send entries."""
        if self.pieces is None:
            return len(self.rounds)
        return sum(self.pieces[number] for number, _ in self.rounds)

    @property
    def side(self) -> int:
        """The branch of the switch: 0 sends nothing, 1 + i rung i, the last several."""
        if len(self.rounds) > 1:
            return 1 + len(self.ladder.rungs)
        return 1 + self.rounds[0][0] if self.rounds else 0

    @property
    def group(self) -> int:
        """The index of the program that unpacks the taken branch."""
        return [self.side in sides for sides in self.groups].index(True)

    @property
    def side_of_group(self) -> int:
        """The branch that is taken of that program's switch."""
        return self.side - (self.groups[self.group].start if self.groups else 0)

    def tiles(self, counts: np.ndarray) -> np.ndarray:
        """Returns for each rank the number of tiles of all rounds and parts."""
        tiles, first = np.zeros(len(counts), int), 0
        for _, length in self.rounds:
            here = np.clip(counts - first, 0, length)
            tiles += (-(-here // self.ladder.tile)).sum(1)
            first += length
        return tiles

    def moved(self, counts: np.ndarray) -> tuple[float, float]:
        """Returns the entries of a round, of all parts, and the bytes of their slots.

        Both are means over ranks and rounds.
        """
        rounds = max(len(self.rounds), 1)
        entries = counts.sum() / len(counts) / rounds
        indices = 0.0
        for number, _ in self.rounds:
            code = self.ladder.rungs[number].code
            lane, each, others = code.needed_terms(self.ladder.width)
            indices += (lane + each) * entries + others * counts.shape[1]
        return entries, indices / 8 / rounds

    @property
    def pays(self) -> bool:
        """Whether entries are chosen, because they take fewer bytes than the dense sum."""
        rounds, last = divmod(self.need, self.ladder.top)
        rungs = [self.ladder.rungs[-1]] * rounds
        if last:
            sizes = self.ladder.rungs
            if self.ladder.at_once and rounds:
                sizes = [sizes[i] for i in self.ladder.finals]
            rungs.append(next(r for r in sizes if r.capacity >= last))
        sent = 4 * self.messages * sum(rung.words for rung in rungs)
        return sent + self.rest + self.overhead < self.dense
