"""The settings of what runs on the testbed, which all its processes share.

JAX is not needed here.
"""

import dataclasses
import importlib
import pathlib

from benchmarks.harness import settings
from benchmarks.harness.settings import option
from benchmarks.testbed import network


# What is taken in place of an example's size "small". The first number is that of a table's
# rows. The language model's tables are to hold at least the share of its numbers that Zen's
# LSTM has in tables, 95.5%; the others' are as the examples have them.
SIZES: dict[str, tuple | None] = {
    "language_model": (40_000, 128, None),
    "click_model": None,
    "translation": None,
    "transformer_tp": None,
    "digits_vgg": None,
    "extreme_classification": None,
}
WITH_TABLES = ("language_model", "click_model", "translation")
# Runs that leave something out: their losses are not to be those of dense.
LOSSY = ("ok_topk", "spardl", "dragonn", "dgc")
# Devices of a host, where a model is cut in as many.
DEVICES = {"transformer_tp": 2}
# Of an example's module: no dense steps before sparse ones.
CONSTANTS = {"digits_vgg": {"WARM_UP": 0}}


def folder_of(out: str | None) -> pathlib.Path | None:
    """The folder of the result files; None for benchmarks/results."""
    return pathlib.Path(out) if out else None


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Trains the examples' models on a network of a given rate."""

    PROGRAM = "benchmarks.workloads network"
    examples: tuple[str, ...] = option(tuple(SIZES), choices=tuple(SIZES))
    hosts: tuple[int, ...] = option((4, 16), "numbers of hosts")
    rate: str = option("250mbit", "of each link, each way")
    systems: tuple[str, ...] = option((), "all that an example has, the default, or some")
    rows: int = option(0, "of each table; those of `options.SIZES` if 0")
    small: bool = option(False, "take the examples' own small sizes")
    steps: int = option(2, "of each system in a turn")
    rounds: int = option(3, "turns that count")
    peers: str | None = option(
        None, "the Python of an environment with torch", recorded="PYTHON"
    )
    timeout: float = option(1800.0, "seconds for each example and number of hosts")
    out: str | None = option(None, "a folder for the results, not benchmarks/results")
    argv: tuple[str, ...] = option((), "further options of the example", hidden=True)
    task: str = option("", "the example that processes train", hidden=True)
    data: str = option("", "the folder for what PyTorch reads", hidden=True)

    def __post_init__(self):
        super().__post_init__()
        network.bits_per_second(self.rate)
        without = [name for name in self.examples if name not in WITH_TABLES]
        if self.rows and without:
            raise ValueError(
                f"--rows is of {', '.join(WITH_TABLES)}; {without[0]} has no table whose "
                "rows can be chosen: name others with --examples"
            )

    @property
    def count(self) -> int:
        """Batches that a system takes: one to compile, and a turn that does not count."""
        return 1 + (self.rounds + 1) * (self.steps + 1)

    @property
    def size(self) -> tuple | None:
        """What is taken in place of the example's small size; None for that."""
        size = None if self.small else SIZES[self.task]
        if not self.rows:
            return size
        if size is None:
            size = importlib.import_module(f"examples.{self.task}").SIZES["small"]
        return (self.rows, *size[1:])


@dataclasses.dataclass(frozen=True)
class CurveSettings(Settings):
    """Trains the examples' models on a network, and keeps the losses and their times."""

    PROGRAM = "benchmarks.workloads curves"
    examples: tuple[str, ...] = option(
        ("language_model", "click_model"), choices=tuple(SIZES)
    )
    hosts: tuple[int, ...] = option((16,), "numbers of hosts")
    systems: tuple[str, ...] = option(("dense", "rows", "embrace"), "what is compared")
    steps: int = option(40, "of each system")
    turn: int = option(5, "steps of a system until the next one's turn")
    rounds: int = option(0, hidden=True)

    @property
    def count(self) -> int:
        """Batches that a system takes: one to compile, then all steps."""
        return 1 + self.steps
