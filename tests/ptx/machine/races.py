"""Which accesses of a launch nothing orders: a race, whatever came of it this time.

Two accesses of one place by different threads conflict where one of them writes and not
both are atomic. They are ordered by a barrier of the block between them, and by nothing
else: blocks of one launch are never ordered, and neither are the warps of a block, nor the
lanes of a warp, without a barrier. Who touched a place is remembered by kind of access: one
thread, several of one block since its last barrier, or anybody.
"""

import dataclasses
from typing import NamedTuple

import numpy as np


NOBODY, ANYBODY = -1, -2
# Of block b, several: _SEVERAL - b.
_SEVERAL = -3
# What each kind of access conflicts with.
CONFLICTS = {
    "load": ("store", "atomic"),
    "store": ("load", "store", "atomic"),
    "atomic": ("load", "store"),
}


class Access(NamedTuple):
    """One instruction of a warp.

    Attributes:
        number: The instruction.
        block: The block.
        epoch: How many barriers the block has passed.
        threads: The lanes that execute it, by their number in the grid.
    """

    number: int
    block: int
    epoch: int
    threads: np.ndarray


@dataclasses.dataclass(frozen=True)
class Conflict:
    """Two accesses of one place that nothing orders.

    Attributes:
        buffer: The name of the buffer.
        offset: Where in it, in bytes; one of them.
        first: The kind and the number of the instruction that came first.
        second: Those of the other.
        threads: Who they were, as far as is known.
    """

    buffer: str
    offset: int
    first: tuple[str, int]
    second: tuple[str, int]
    threads: tuple[int, int]

    @property
    def pair(self):
        """What makes it the same fault as another."""
        return self.buffer, self.first, self.second


class _Last:
    """Who touched each place last in one way, when, and by which instruction."""

    def __init__(self, places, threads):
        self._threads = threads
        self.who = np.full(places, NOBODY, np.int32)
        self.when = np.zeros(places, np.int32)
        self.number = np.zeros(places, np.int32)

    def _ordered(self, places, access, lanes):
        """Whether the last came before the access in the order of its thread."""
        who = self.who[places]
        block = np.where(who >= 0, who // self._threads, _SEVERAL - who)
        is_here = block == access.block
        past = is_here & (self.when[places] < access.epoch)
        return (who == NOBODY) | (who == lanes) | past, is_here

    def unordered(self, places, access, lanes):
        return np.flatnonzero(~self._ordered(places, access, lanes)[0])

    def note(self, places, access, lanes):
        ordered, is_here = self._ordered(places, access, lanes)
        among = np.where(is_here, _SEVERAL - access.block, ANYBODY)
        self.who[places] = np.where(ordered, lanes, among)
        # Several lanes of one instruction.
        also = self.who[places] != np.where(ordered, lanes, among)
        self.who[places[also]] = _SEVERAL - access.block
        self.when[places] = access.epoch
        self.number[places] = access.number


class Watch:
    """The accesses of a buffer in one launch."""

    def __init__(self, name: str, size: int, threads: int, grain: int):
        """The grain is the size of the smallest access, in bytes."""
        self._name, self._grain = name, grain
        places = -(-size // grain)
        self._last = {kind: _Last(places, threads) for kind in CONFLICTS}

    def note(self, kind: str, offsets: np.ndarray, size: int, access: Access):
        """Remembers an access of some bytes by each lane; the `Conflict`s that it has."""
        step = np.arange(0, size, self._grain)
        places = ((offsets[:, None] + step) // self._grain).reshape(-1)
        lanes = np.repeat(access.threads, len(step))
        found = []
        for other in CONFLICTS[kind]:
            last = self._last[other]
            bad = last.unordered(places, access, lanes)
            if len(bad):
                one = bad[0]
                place = places[one]
                found.append(
                    Conflict(
                        self._name,
                        int(place) * self._grain,
                        (other, int(last.number[place])),
                        (kind, access.number),
                        (int(last.who[place]), int(lanes[one])),
                    )
                )
        self._last[kind].note(places, access, lanes)
        return found
