"""Reads result files: their rows, and how these were measured."""

import json
import pathlib
import statistics
from typing import Any


FOLDER = pathlib.Path(__file__).parent.parent / "results"
# The modules that have moved since they recorded a file, and where they are now.
_MOVED = {
    "benchmarks.choosing_network": "benchmarks.papers.top_k.network",
    "benchmarks.choosing_training": "benchmarks.papers.top_k.training",
    "benchmarks.communication": "benchmarks.network.communication",
    "benchmarks.sparse_training": "benchmarks.training.sparse_training",
    "benchmarks.sparsifiers": "benchmarks.kernels.sparsifiers",
}


class Results:
    """A result file.

    Attributes:
        name: The name of the file.
        head: Its first line, which says how the rows were measured.
        rows: All other lines.
    """

    def __init__(self, path: pathlib.Path):
        """Reads the file.

        Args:
            path: The path of a file that a `Recorder` has written.

        Raises:
            FileNotFoundError: There is none.
        """
        self.name = path.name
        self.head, *self.rows = map(json.loads, path.read_text().splitlines())

    def where(self, **wanted: Any) -> list[dict]:
        """Returns the rows with these values of fields."""
        return [r for r in self.rows if all(r.get(k) == v for k, v in wanted.items())]

    def one(self, **wanted: Any) -> dict:
        """Returns the only row with these values of fields."""
        found = self.where(**wanted)
        assert len(found) == 1, (self.name, wanted, len(found))
        return found[0]

    def measured(self) -> str:
        """Returns JAX's version, the machines, the last date and the last command.

        The command has the module's present name.
        """
        runs = [self.head, *self.head.get("kept", [])]
        machines = sorted({_machine(run) for run in runs})
        newest = max(run["date"] for run in runs)
        return (
            f"JAX {self.head['jax']}, {' and '.join(machines)}, {newest}, "
            f"last by `{_present(self.head['command'])}`"
        )


def _present(command):
    words = command.split(" ")
    return " ".join(_MOVED.get(word, word) for word in words)


def _machine(run):
    beside = f" with {run['device']}" if "device" in run else ""
    return f"{run['cores']} cores of {run['processor']}{beside}"


def seconds(row: dict) -> float:
    """Returns the median time of a row."""
    return statistics.median(row["seconds"])


def a_step(row: dict) -> float:
    """Returns the seconds of one step, of a row that has times of several steps."""
    return seconds(row) / row["steps"]


def read(name: str) -> Results:
    """Reads a file of benchmarks/results, by its name without the ending."""
    return Results(FOLDER / f"{name}.jsonl")
