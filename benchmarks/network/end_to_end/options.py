"""The settings, which all processes share. JAX is not needed here."""

import dataclasses

from benchmarks.data import clicks
from benchmarks.harness import settings
from benchmarks.harness.settings import option
from benchmarks.testbed import network


TASKS = ("language", "clicks")
LEARNING_RATE = 5e-3


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Trains models on a network of a given rate."""

    PROGRAM = "benchmarks.network.end_to_end"
    hosts: tuple[int, ...] = option((4, 16), "numbers of hosts")
    rate: str = option("250mbit", "of each link, each way")
    tasks: tuple[str, ...] = option(("language",), "what is trained", choices=TASKS)
    width: int = option(256, "of the language model's tables")
    millions: float = option(10.0, "rows of the click model's table, in millions")
    examples: int = option(clicks.BATCH, "of the click model, a host and step")
    ids: str = option("zipf", "of the click model", choices=clicks.KINDS)
    capacity: int = option(90_000, "distinct rows of a host, for rows of a capacity")
    sides: tuple[str, ...] = option((), "all that the task has, which are the default, or")
    steps: int = option(3, "of each side in a turn")
    rounds: int = option(3, "turns")
    peers: str | None = option(
        None, "the Python of an environment with torch", recorded="PYTHON"
    )
    timeout: float = option(3600.0, "seconds for each task and number of hosts")
    task: str = option("", "the one that processes train", hidden=True)
    data: str = option("", "the folder with its data", hidden=True)

    def __post_init__(self):
        super().__post_init__()
        network.bits_per_second(self.rate)

    @property
    def count(self) -> int:
        """Batches that a side takes: one to compile, then a turn more than are counted."""
        return 1 + (self.rounds + 1) * (self.steps + 1)

    @property
    def rows(self) -> int:
        """Rows of the click model's table."""
        return round(1e6 * self.millions)
