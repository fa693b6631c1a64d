"""The plan of a push and a pull: message sizes, bytes, and whether entries pay.

The arithmetic is written once. A scheme uses it in `forecast`, on Python numbers, and in
the program, on the counts on which ranks agreed. Both are in float32, so that both make the
same choice, except where two alternatives are equal to the last bit.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from sparsejax.units.bits import WORD
from sparsejax.wire import collectives
from sparsejax.wire.channels import Route
from sparsejax.wire.ladder import Count, Ladder, Message


# Parts count as even if the slots of all parts are at most this multiple of all units.
EVEN = 1.5
# The most collectives of a dense pull on GPUs.
_RUNS = 16


@dataclasses.dataclass(frozen=True)
class OwnerPlan:
    """The bytes that one rank would send in push and pull, from counts of entries.

    Attributes:
        ranks: The number of ranks, which is also that of parts.
        units: The number of units of the array.
        width: The number of slots of a part.
        unit_bytes: The bytes of a unit's value on the wire.
        dense_bytes: The bytes that one rank sends in an all-reduce.
        push: The message sizes of the push.
        back: The options of messages of the pull.
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
        """The message sizes of the pull."""
        return self.back.ladder(self.width, self.unit_bytes, self.ranks, self.units)

    @property
    def route(self) -> Route:
        """The route of both push and pull: a message to each of the other ranks."""
        return Route(self.ranks - 1)

    @property
    def has_even_parts(self) -> bool:
        """Whether parts have about equal widths, so that to gather them whole is cheap."""
        return self.ranks * self.width <= EVEN * self.units + 32 * self.ranks

    @property
    def runs(self) -> tuple[int, int]:
        """The number of slots that each run of a dense pull gathers, and that of runs.

        On GPUs runs are short, so that few sums are in memory twice. All have one length,
        so the last overlaps the one before.
        """
        if not collectives.at_once():
            return self.width, 1
        length = min(WORD * -(-self.width // (_RUNS * WORD)), self.width)
        return length, -(-self.width // length)

    @property
    def whole_bytes(self) -> float:
        """The bytes that one rank sends in a dense pull of its sums."""
        if self.has_even_parts:
            length, runs = self.runs
            return float((self.ranks - 1) * length * runs * self.unit_bytes)
        return collectives.all_reduce_bytes(self.units * self.unit_bytes, self.ranks)

    @property
    def may_pay(self) -> bool:
        """Whether entries can pay for any gradient of this size: see `collectives.pays`.

        They cannot for few units a rank: parts are padded to whole words of slots.
        """
        least = (self.ranks - 1) * 4 * self.push.rungs[0].words
        return collectives.pays(least + self._most_pulled, self.dense_bytes)

    @property
    def _most_pulled(self):
        """The most bytes of a pull; 0 where the dense pull is an all-reduce of the sums."""
        return self.whole_bytes if self.has_even_parts else 0.0

    def entry_bytes(self, pushed: Count) -> Any:
        """Returns an upper bound of the bytes that one rank sends if entries are pushed.

        Args:
            pushed: The entries of the fullest part of a rank.
        """
        return self.push_bytes(pushed) + self._most_pulled

    def push_bytes(self, pushed: Count) -> Any:
        """Returns the bytes of a push; for the argument see `entry_bytes`."""
        return (self.ranks - 1) * self.push.bytes(pushed)

    def pull_bytes(self, pulled: Count) -> Any:
        """Returns the bytes that one rank sends in a pull of entries.

        Args:
            pulled: The entries of the fullest part of the sum.
        """
        return (self.ranks - 1) * self.pull.bytes(pulled)

    def expected_bytes(self, pushed: Count, pulled: Count) -> Any:
        """Returns the bytes of push and pull, or of the all-reduce where these do not pay.

        For the arguments see `push_bytes` and `pull_bytes`.
        """
        pull = jnp.minimum(self.pull_bytes(pulled), self.whole_bytes)
        push = self.push_bytes(pushed)
        pays = collectives.pays(push + self._most_pulled, self.dense_bytes)
        pays = self.may_pay & pays
        return jnp.where(pays, push + pull, self.dense_bytes)
