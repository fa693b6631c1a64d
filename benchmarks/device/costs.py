"""What a launch, a wait and a kernel's work cost, and the time of a step that follows.

A kernel moves bytes, computes and scatters at the same time, so it takes as long as the
slowest of the three: "moving" is the time of its bytes, "computing" and "scattering" are
what it takes beyond that. An update that is dropped counts as one that is written, since no
text says how many are: "scattering" is an upper bound.

The costs are stated, except for that of a scattered write: an unpack of 19.1 million of
them took 1.03 ms on an H200. `--costs FILE` replaces them by a JSON object with the fields
of `Costs`.
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
        operations: Operations on single numbers a second: those of 64 lanes of 132
            multiprocessors at 1.98 GHz.
        scattered: Seconds of a scattered write.
        source: Where these figures come from.
    """

    launch: float = 3e-6
    wait: float = 10e-6
    memory: float = 4.8e12
    reached: float = 0.8
    operations: float = 64 * 132 * 1.98e9
    scattered: float = 54e-12
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
        """Seconds of a step on the device; no kernel overlaps with another."""
        computing = scattering = 0.0
        for often, work in counts.kernels:
            moving = self.moving(work.read + work.written)
            computed = work.operations / self.operations
            scattered = work.scattered * self.scattered
            if computed > scattered:
                computing += often * max(0.0, computed - moving)
            else:
                scattering += often * max(0.0, scattered - moving)
        return {
            "launching": self.launch * counts.launches,
            "waiting": self.wait * counts.waits,
            "moving": self.moving(counts.read + counts.written),
            "computing": computing,
            "scattering": scattering,
        }


def beyond(seconds: dict[str, float]) -> float:
    """What kernels take beyond the time of their bytes, of `Costs.seconds`."""
    return seconds.get("computing", 0.0) + seconds.get("scattering", 0.0)


def on_wire(sent: float, rate: float) -> float:
    """Seconds of so many bytes at so many Gbit/s."""
    return sent * 8 / (rate * 1e9)
