"""The forecast of a chunked exchange, whose size is constant, for `sparsejax.explain`."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from sparsejax.schemes.base import LossyScheme
from sparsejax.schemes.forecast import Forecast, Load


Shapes = tuple[tuple[int, ...], ...]


class Cost(NamedTuple):
    """The cost of an exchange.

    Attributes:
        push: The bytes that a rank sends to owners, or to all ranks without owners.
        pull: The bytes of sums that it sends as an owner.
        messages: The number of messages that wait for one another.
        sent: The number of entries that a rank sends.
        back: The upper bound of the number of entries of a result.
    """

    push: int
    pull: int
    messages: int
    sent: int
    back: int


@dataclasses.dataclass(frozen=True)
class Chunks(LossyScheme):
    """A chunked exchange in the form of a scheme, for forecasts only; it is never called.

    Attributes:
        cost: A function of shapes of leaves and a number of ranks that returns the cost.
        shapes: The shapes of the leaves.
    """

    cost: Callable[[Shapes, int], Cost]
    shapes: Shapes = ()

    def __call__(self, x, state, wire):
        """Raises NotImplementedError: `ChunkedExchange` sends, not this scheme."""
        del x, state, wire
        raise NotImplementedError("ChunkedExchange sends what Chunks forecasts.")

    def densities(self, load: Load) -> tuple[float, float]:
        """Returns the density of what a rank sends, and the upper bound of the result's."""
        cost = self.cost(self.shapes, load.ranks)
        return cost.sent / max(load.units, 1), cost.back / max(load.units, 1)

    def forecast(self, load: Load) -> Forecast:
        """Returns the messages of the exchange, which do not depend on values."""
        push, pull, messages, sent, _ = self.cost(self.shapes, load.ranks)
        return Forecast(push, pull, messages, sent, rounds=2 if pull else 1)
