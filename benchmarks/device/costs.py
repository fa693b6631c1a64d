"""What a launch, a wait and a byte cost, and the time of a step that follows.

The costs are stated, not measured: `--costs FILE` replaces them by a JSON object with the
fields of `Costs`.
"""

import dataclasses
import json
import pathlib
from typing import Self

from benchmarks.device.walk import Counts


RATES = (25, 100, 400)  # Gbit/s


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds, and bytes a second.

    Attributes:
        launch: Seconds until a kernel runs that does hardly anything.
        wait: Seconds from the end of a kernel until the host knows its answer and has
            launched the next.
        memory: Bytes a second of the device's memory, by its description.
        reached: The share of them that a kernel reaches.
        source: Where these figures come from.
    """

    launch: float = 3e-6
    wait: float = 10e-6
    memory: float = 4.8e12
    reached: float = 0.8
    source: str = "stated"

    @classmethod
    def read(cls, path: str | None) -> Self:
        """Those of a file, or those that are stated here."""
        if path is None:
            return cls()
        given = json.loads(pathlib.Path(path).read_text())
        fields = {field.name for field in dataclasses.fields(cls)}
        if strange := set(given) - fields:
            raise ValueError(
                f"{path} has {', '.join(sorted(strange))}; costs are {', '.join(fields)}"
            )
        return cls(**({"source": pathlib.Path(path).name} | given))

    def moving(self, moved: float) -> float:
        """Seconds to move so many bytes to or from memory."""
        return moved / (self.memory * self.reached)

    def seconds(self, counts: Counts) -> dict[str, float]:
        """Seconds of a step on the device; no part is hidden behind another."""
        return {
            "launching": self.launch * counts.launches,
            "waiting": self.wait * counts.waits,
            "moving": self.moving(counts.read + counts.written),
        }


def on_wire(sent: float, rate: float) -> float:
    """Seconds of so many bytes at so many Gbit/s."""
    return sent * 8 / (rate * 1e9)
