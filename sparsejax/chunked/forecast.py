"""What a chunked exchange would send, for `sparsejax.explain`: its size is fixed."""

import dataclasses
from typing import NamedTuple, Protocol

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


class Fixed(Protocol):
    """An exchange whose messages have sizes that follow from shapes."""

    def cost(self, shapes: Shapes, ranks: int) -> Cost:
        """What an exchange of leaves of these shapes takes among this number of ranks."""
        ...


@dataclasses.dataclass(frozen=True)
class Chunks(LossyScheme):
    """A chunked exchange as a scheme that is forecast, and never called.

    Attributes:
        exchange: The exchange.
        shapes: Of the leaves.
    """

    exchange: Fixed | None = None
    shapes: Shapes = ()

    def __call__(self, x, state, wire):
        """Raises: the exchange sends what is forecast here."""
        del x, state, wire
        raise NotImplementedError("ChunkedExchange sends what Chunks forecasts.")

    def densities(self, load: Load) -> tuple[float, float]:
        """The share of elements that a rank sends, and at most that of the result."""
        cost = self._cost(load)
        return cost.sent / max(load.units, 1), cost.back / max(load.units, 1)

    def forecast(self, load: Load) -> Forecast:
        """The messages of the exchange, whatever is in them."""
        push, pull, messages, sent, _ = self._cost(load)
        return Forecast(push, pull, messages, sent, rounds=2 if pull else 1)

    def _cost(self, load):
        return (
            Cost(0, 0, 0, 0, 0)
            if self.exchange is None
            else self.exchange.cost(self.shapes, load.ranks)
        )
