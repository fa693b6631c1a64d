"""The machine that a measurement was taken on, and the files that keep its rows."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Sequence

import jax


RESULTS = pathlib.Path(__file__).parent.parent / "results"


def machine() -> dict:
    """Returns the machine, its backend, and the versions that rows are measured with."""
    processor = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            names = [
                line.split(":", 1)[1].strip() for line in lines if "model name" in line
            ]
        processor = names[0] if names else processor
    except OSError:
        pass
    return {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": platform.python_version(),
        "processor": processor,
        "cores": os.cpu_count(),
        "backend": jax.default_backend(),
    }


def path_of(name: str, ending: str, folder: pathlib.Path | None = None) -> pathlib.Path:
    """Returns the path of a result file: its name, the version of JAX, and its ending."""
    return (folder or RESULTS) / f"{name}-jax{jax.__version__}{ending}"


class Recorder:
    """The rows of a run, and their file: one JSON object a line.

    The first line says where and by which command the rows were measured.

    Attributes:
        head: The first line.
        rows: The rows of this run.
        path: The path of the file.
    """

    def __init__(
        self,
        name: str,
        command: str,
        keys: Sequence[str] = (),
        folder: pathlib.Path | None = None,
    ):
        """Prints the machine and the versions of the run.

        Args:
            name: The name of the file.
            command: The command line that repeats the run.
            keys: The fields that identify a row: rows of an earlier file are kept unless a
                row of this run is equal in all of these. Without keys none are kept.
            folder: The folder of the file, instead of benchmarks/results.
        """
        self.head = machine() | {"command": command}
        self.rows: list[dict] = []
        self.path = path_of(name, ".jsonl", folder)
        self._keys = keys
        self._earlier: list[dict] = []
        if keys and self.path.exists():
            self._earlier = [*map(json.loads, self.path.read_text().splitlines())]
        say(", ".join(f"{key} {value}" for key, value in self.head.items()))

    def add(self, **row) -> None:
        """Adds a row."""
        self.rows.append(row)

    def kept(self) -> list[dict]:
        """Returns the rows of the earlier file that no row of this run replaces."""
        measured = {self._key(row) for row in self.rows}
        return [row for row in self._earlier[1:] if self._key(row) not in measured]

    def all_rows(self) -> list[dict]:
        """Returns the rows that `write` writes."""
        return [*self.kept(), *self.rows]

    def write(self) -> pathlib.Path:
        """Writes the file, replacing an earlier one, and returns its path."""
        head = dict(self.head)
        if kept := self.kept():
            earlier = dict(self._earlier[0])
            head["kept"] = [*earlier.pop("kept", []), earlier | {"rows": len(kept)}]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row) for row in (head, *self.all_rows())]
        self.path.write_text("\n".join(lines) + "\n")
        return self.path

    def _key(self, row: dict) -> str:
        return json.dumps([row.get(key) for key in self._keys])


def say(line: str = "") -> None:
    """Prints a line, and flushes it."""
    print(line, flush=True)
