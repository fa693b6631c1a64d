"""The costs of a launch, a wait and a kernel's work, and the time of a step by them.

A kernel moves bytes, computes and scatters concurrently, so it takes as long as the slowest
of the three: "moving" is the time of its bytes, "computing" and "scattering" are the time
beyond that. A dropped update counts as a written one, because a program's text does not
show how many are dropped: "scattering" is an upper bound.

The costs are stated, not measured, except for a scattered write: an unpack of 19.1 million
of them took 1.03 ms on an H200. `--costs FILE` replaces them by those of a JSON object with
the fields of `Costs`.
"""

import dataclasses
import json
import pathlib
from typing import Self

from benchmarks.device.walk import Counts


RATES = (25, 100, 400)  # Gbit/s


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of a device, in seconds, bytes and operations a second.

    Attributes:
        launch: Seconds to launch a kernel that does almost nothing.
        wait: Seconds from the end of a kernel until the host has read its result and has
            launched the next.
        memory: The bandwidth of the device's memory by its data sheet, in bytes a second.
        reached: The share of this bandwidth that a kernel reaches.
        operations: Scalar operations a second: 64 lanes of each of 132 multiprocessors, at
            1.98 GHz.
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
        """Reads the costs of a file; without one, returns the stated costs."""
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
        """Returns the seconds that it takes to move `moved` bytes to or from memory."""
        return moved / (self.memory * self.reached)

    def seconds(self, counts: Counts) -> dict[str, float]:
        """Returns the seconds of a step by part, if no kernel overlaps with another."""
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
    """Returns the seconds of `Costs.seconds` that exceed the time of moving bytes."""
    return seconds.get("computing", 0.0) + seconds.get("scattering", 0.0)


def on_wire(sent: float, rate: float) -> float:
    """Returns the seconds that `sent` bytes take at `rate` Gbit/s."""
    return sent * 8 / (rate * 1e9)
