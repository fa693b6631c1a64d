"""Times of the kernels on this device, by backend and against other implementations.

    python -m benchmarks.kernels [compact] [decode] [partition] [memory]

Every result is checked before it is timed; sides take turns. `memory` repeats figure 14 of
Zen: the cost of Algorithm 1 by the size of its memory (r1, in indices) and by its number of
hashes (k), with reading the indices out of that memory again. Writes
benchmarks/results/kernels-*.jsonl, and figure 14 as CSV and PNG.
"""

import dataclasses

import jax

from benchmarks.harness import settings
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.kernels import figure14, operations


PARTS = {
    "compact": operations.compact,
    "decode": operations.decode,
    "partition": operations.partition,
    "memory": figure14.memory,
}


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Times the kernels on this device."""

    PROGRAM = "benchmarks.kernels"
    parts: tuple[str, ...] = option(
        (), "all if none,", positional=True, choices=tuple(PARTS)
    )


def main(argv: list[str] | None = None) -> None:
    settings = Settings.parse(argv)
    name = f"kernels-{jax.default_backend()}"
    record = Recorder(name, settings.command(), ("part",))
    for part in settings.parts or PARTS:
        PARTS[part](record)
    say(f"\nwritten: {record.write()}")


if __name__ == "__main__":
    main()
