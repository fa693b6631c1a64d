"""What a chunked exchange would send, for `sparsejax.explain`: its size is fixed."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from sparsejax.schemes.base import LossyScheme
from sparsejax.schemes.forecast import Forecast, Load


Shapes = tuple[tuple[int, ...], ...]


class Cost(NamedTuple):
    """What an exchange takes.

    Attributes:
        push: Bytes that a rank sends to owners.
        pull: Bytes of sums that it sends as an owner.
        messages: How many messages wait for one another.
        sent: Entries that a rank sends.
        back: Entries that a result has at most.
    """

    push: int
    pull: int
    messages: int
    sent: int
    back: int


@dataclasses.dataclass(frozen=True)
class Chunks(LossyScheme):
    """A chunked exchange as a scheme that is forecast, and never called.

    Attributes:
        cost: What an exchange of leaves of some shapes takes among a number of ranks.
        shapes: Of the leaves.
    """

    cost: Callable[[Shapes, int], Cost]
    shapes: Shapes = ()

    def __call__(self, x, state, wire):
        """Raises: the exchange sends what is forecast here."""
        del x, state, wire
        raise NotImplementedError("ChunkedExchange sends what Chunks forecasts.")

    def densities(self, load: Load) -> tuple[float, float]:
        """The share of elements that a rank sends, and at most that of the result."""
        cost = self.cost(self.shapes, load.ranks)
        return cost.sent / max(load.units, 1), cost.back / max(load.units, 1)

    def forecast(self, load: Load) -> Forecast:
        """The messages of the exchange, whatever is in them."""
        push, pull, messages, sent, _ = self.cost(self.shapes, load.ranks)
        return Forecast(push, pull, messages, sent, rounds=2 if pull else 1)
