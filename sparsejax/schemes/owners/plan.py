"""The plan of a push and a pull: message sizes, bytes, and whether entries pay.

The arithmetic is written once. A scheme uses it before anything runs, on numbers of Python
(`forecast`), and while it runs, on the counts that ranks agreed on: in float32 either way,
so that both decide the same, but where two ways are equal to the last bit.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from sparsejax.units.bits import WORD
from sparsejax.wire import collectives
from sparsejax.wire.channels import Route
from sparsejax.wire.ladder import Count, Ladder, Message


# Parts are as good as even if all slots are at most this multiple of all units.
EVEN = 1.5
# On GPUs no more collectives than this give all sums to all ranks.
_RUNS = 16


@dataclasses.dataclass(frozen=True)
class OwnerPlan:
    """What one rank would send to owners, and owners to all: bytes by counts of entries.

    Attributes:
        ranks: How many ranks there are, and so parts.
        units: Units of the array.
        width: Slots in a part.
        unit_bytes: Bytes of a unit's value as it travels.
        dense_bytes: Bytes that one rank sends for an all-reduce.
        push: The message sizes to the owners.
        back: How entries travel back.
    """

    ranks: int
    units: int
    width: int
    unit_bytes: int
    dense_bytes: float
    push: Ladder
    back: Message

    @functools.cached_property
    def pull(self) -> Ladder:
        """The message sizes on the way back."""
        return self.back.ladder(self.width, self.unit_bytes, self.ranks, self.units)

    @property
    def route(self) -> Route:
        """What a rank puts on the wire either way: a message to each of the others."""
        return Route(self.ranks - 1)

    @property
    def has_even_parts(self) -> bool:
        """Whether parts have about equal widths, so that gathering them whole is cheap."""
        return self.ranks * self.width <= EVEN * self.units + 32 * self.ranks

    @property
    def runs(self) -> tuple[int, int]:
        """The slots that are gathered at a time where all sums come back, and how often.

        On GPUs few are, so that few sums are in memory twice. All runs have one length, so
        the last has some of the slots of the one before again.
        """
        if not collectives.at_once():
            return self.width, 1
        length = min(WORD * -(-self.width // (_RUNS * WORD)), self.width)
        return length, -(-self.width // length)

    @property
    def whole_bytes(self) -> float:
        """Bytes that one rank sends to give its sums to all, zeros and all."""
        if self.has_even_parts:
            length, runs = self.runs
            return float((self.ranks - 1) * length * runs * self.unit_bytes)
        return collectives.all_reduce_bytes(self.units * self.unit_bytes, self.ranks)

    @property
    def may_pay(self) -> bool:
        """Whether to send entries can pay, for any gradient: see `collectives.pays`.

        Parts have whole words of slots; with few units a rank, most belong to none.
        """
        least = (self.ranks - 1) * 4 * self.push.rungs[0].words
        return collectives.pays(least + self._most_pulled, self.dense_bytes)

    @property
    def _most_pulled(self):
        """Bytes that a pull may send; none where an all-reduce of the sums bounds it."""
        return self.whole_bytes if self.has_even_parts else 0.0

    def entry_bytes(self, pushed: Count) -> Any:
        """Bytes that one rank sends at most if entries are pushed.

        Args:
            pushed: Entries of the fullest part of a rank.
        """
        return self.push_bytes(pushed) + self._most_pulled

    def push_bytes(self, pushed: Count) -> Any:
        """Bytes that one rank sends to push entries; for the argument see above."""
        return (self.ranks - 1) * self.push.bytes(pushed)

    def pull_bytes(self, pulled: Count) -> Any:
        """Bytes that one rank sends to give all its entries.

        Args:
            pulled: Entries of the fullest part of the sum.
        """
        return (self.ranks - 1) * self.pull.bytes(pulled)

    def expected_bytes(self, pushed: Count, pulled: Count) -> Any:
        """Bytes that one rank sends; for the arguments see the two methods above."""
        pull = jnp.minimum(self.pull_bytes(pulled), self.whole_bytes)
        push = self.push_bytes(pushed)
        pays = collectives.pays(push + self._most_pulled, self.dense_bytes)
        pays = self.may_pay & pays
        return jnp.where(pays, push + pull, self.dense_bytes)
