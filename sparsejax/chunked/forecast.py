"""What a chunked exchange would send, for `sparsejax.explain`: its size is fixed."""

import dataclasses

from sparsejax.schemes.base import LossyScheme
from sparsejax.schemes.forecast import Forecast, Load


@dataclasses.dataclass(frozen=True)
class Chunks(LossyScheme):
    """The message of a chunked exchange as a scheme that is forecast, and never called.

    Attributes:
        message: Bytes of a rank's message.
        density: The share of elements that it has.
    """

    message: int = 0
    density: float = 1.0

    def __call__(self, x, state, wire):
        """Raises: the exchange sends what is forecast here."""
        del x, state, wire
        raise NotImplementedError("ChunkedExchange sends what Chunks forecasts.")

    def forecast(self, load: Load) -> Forecast:
        """One all-gather of the message, whatever is in it."""
        others = load.ranks - 1
        entries = round(self.density * load.units)
        return Forecast(others * self.message, 0.0, others, entries, rounds=1)
