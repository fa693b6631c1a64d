"""Result files, read: their rows, and how these were measured."""

import json
import pathlib
import statistics
from typing import Any


FOLDER = pathlib.Path(__file__).parent.parent / "results"


class Results:
    """A result file.

    Attributes:
        name: Of the file.
        head: Its first line, which says how the rows were measured.
        rows: All other lines.
    """

    def __init__(self, path: pathlib.Path):
        """Reads the file.

        Args:
            path: Of a file that a `Recorder` has written.

        Raises:
            FileNotFoundError: There is none.
        """
        self.name = path.name
        self.head, *self.rows = map(json.loads, path.read_text().splitlines())

    def where(self, **wanted: Any) -> list[dict]:
        """The rows with these values."""
        return [r for r in self.rows if all(r.get(k) == v for k, v in wanted.items())]

    def one(self, **wanted: Any) -> dict:
        """The one row with these values."""
        found = self.where(**wanted)
        assert len(found) == 1, (self.name, wanted, len(found))
        return found[0]

    def measured(self) -> str:
        """With which JAX, on which machines, when, and by which command at last."""
        runs = [self.head, *self.head.get("kept", [])]
        machines = sorted({_machine(run) for run in runs})
        newest = max(run["date"] for run in runs)
        return (
            f"JAX {self.head['jax']}, {' and '.join(machines)}, {newest}, "
            f"last by `{self.head['command']}`"
        )


def _machine(run):
    beside = f" with {run['device']}" if "device" in run else ""
    return f"{run['cores']} cores of {run['processor']}{beside}"


def seconds(row: dict) -> float:
    """The median time of a row."""
    return statistics.median(row["seconds"])


def a_step(row: dict) -> float:
    """Seconds of one step of a row whose times are those of several steps."""
    return seconds(row) / row["steps"]


def read(name: str) -> Results:
    """A file of benchmarks/results, by its name without the ending."""
    return Results(FOLDER / f"{name}.jsonl")
