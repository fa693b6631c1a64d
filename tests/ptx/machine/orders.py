"""In which order warps go: drawn from a seed, or given, and the shortest that fails.

A seed also decides how to choose: each warp with the same chance, one for a while, one
until it waits, or one that goes only when no other can. Some faults show under one way.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence


WAYS = ("any", "bursts", "one", "starved")


@dataclasses.dataclass(frozen=True)
class Order:
    """An order.

    Attributes:
        seed: From which it is drawn, as are garbage and the order of lanes.
        given: Warps that go, one access each, while they can; afterwards that with the
            lowest number goes. None: drawn.
    """

    seed: int
    given: tuple[int, ...] | None = None

    @property
    def is_given(self) -> bool:
        return self.given is not None

    def start(self, choices: random.Random) -> "Pick":
        return Pick(self, choices)


class Pick:
    """Chooses the warp that goes next.

    Attributes:
        resident: How many blocks are on the GPU at a time.
        visible: The chance that a store becomes visible with each access of its warp.
    """

    def __init__(self, order: Order, choices: random.Random):
        self._choices = choices
        self._given = None if order.given is None else list(reversed(order.given))
        self._way = choices.choice(WAYS)
        self._last: int | None = None
        self._starved: int | None = None
        self.resident = choices.choice((1, 2, 3, 6, 10))
        self.visible = choices.choice((0.0, 0.1, 1.0))
        if self._given is not None:
            self.resident, self.visible = 10, 0.0

    def __call__(self, ready: dict[int, object]) -> int:
        if self._given is not None:
            while self._given:
                if (one := self._given.pop()) in ready:
                    return one
            return min(ready)
        self._last = self._chosen(ready)
        return self._last

    def _chosen(self, ready):
        warps = list(ready)
        goes_on = self._last in ready
        if self._way == "one" and goes_on:
            return self._last
        if self._way == "bursts" and goes_on and self._choices.random() < 0.9:
            return self._last
        if self._way == "starved":
            if self._starved is None or self._choices.random() < 0.001:
                self._starved = self._choices.choice(warps)
            warps = [one for one in warps if one != self._starved] or warps
        return self._choices.choice(warps)


def shortest(
    order: Sequence[int], fails: Callable[[tuple[int, ...]], bool], limit: int = 200
) -> tuple[int, ...]:
    """The shortest order that was found to fail, by leaving out parts of one that does.

    Args:
        order: The warps in the order in which they went.
        fails: Whether an order fails; the rest goes by number.
        limit: How often it is asked.
    """
    kept, asked = tuple(order), 0
    if fails(()):
        return ()
    parts = 2
    while len(kept) > 1 and asked < limit:
        size = -(-len(kept) // parts)
        for begin in range(0, len(kept), size):
            without = kept[:begin] + kept[begin + size :]
            asked += 1
            if fails(without):
                kept, parts = without, max(2, parts - 1)
                break
            if asked >= limit:
                break
        else:
            if size == 1:
                break
            parts = min(len(kept), 2 * parts)
    return kept
