"""A stage of an exchange of entries, in messages of a ladder's sizes, for a load."""

import dataclasses
import functools

import numpy as np

from sparsejax.wire.ladder import Ladder


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of an exchange: its ladder, as the program was given it, and its load.

    Attributes:
        ladder: The message sizes.
        messages: How many messages a rank sends in a round.
        packed: int [ranks, parts]: entries of each part that a rank sends.
        unpacked: int [ranks, sources]: entries that a rank receives of each.
        dense: Bytes of a rank where this stage goes densely instead.
        rest: Bytes that are reckoned with beside this stage's before it is chosen.
        overhead: Bytes that entries must save to be chosen: see `collectives.pays`.
        pieces: Of each rung, in how many pieces a message is received; whole if None.
        groups: The sides that each program unpacks, where they are divided: see
            `at_once.groups`.
        in_turn: How many launches of ours add a message, or a piece: one a sender where
            the sum is ordered.
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
        """Entries of the fullest part of all ranks."""
        return int(self.packed.max())

    @functools.cached_property
    def rounds(self) -> list[tuple[int, int]]:
        """Of each round the number of its rung, and the entries of a part."""
        rounds, first = [], 0
        for rung in self.ladder.messages_for(self.need, self.messages):
            length = min(self.need - first, rung.capacity)
            rounds.append((self.ladder.rungs.index(rung), length))
            first += length
        return rounds

    @property
    def collectives(self) -> int:
        """How many collectives with entries follow one another."""
        if self.pieces is None:
            return len(self.rounds)
        return sum(self.pieces[number] for number, _ in self.rounds)

    @property
    def side(self) -> int:
        """Of a switch: nothing, one message of a rung, or several."""
        if len(self.rounds) > 1:
            return 1 + len(self.ladder.rungs)
        return 1 + self.rounds[0][0] if self.rounds else 0

    @property
    def group(self) -> int:
        """Of the programs that unpack, which one does."""
        return [self.side in sides for sides in self.groups].index(True)

    @property
    def side_of_group(self) -> int:
        """Of that program's switch, which side is taken."""
        return self.side - (self.groups[self.group].start if self.groups else 0)

    def tiles(self, counts: np.ndarray) -> np.ndarray:
        """Tiles of all rounds and parts, of each rank."""
        tiles, first = np.zeros(len(counts), int), 0
        for _, length in self.rounds:
            here = np.clip(counts - first, 0, length)
            tiles += (-(-here // self.ladder.tile)).sum(1)
            first += length
        return tiles

    def moved(self, counts: np.ndarray) -> tuple[float, float]:
        """Entries of all parts in a round, and bytes of their slots; means of all ranks."""
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
        """Whether entries take fewer bytes than the dense way out."""
        rounds, last = divmod(self.need, self.ladder.top)
        rungs = [self.ladder.rungs[-1]] * rounds
        if last:
            sizes = self.ladder.rungs
            if self.ladder.at_once and rounds:
                sizes = [sizes[i] for i in self.ladder.finals]
            rungs.append(next(r for r in sizes if r.capacity >= last))
        sent = 4 * self.messages * sum(rung.words for rung in rungs)
        return sent + self.rest + self.overhead < self.dense
