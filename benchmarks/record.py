"""Where a measurement was taken, and JSON lines to keep it in."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable

import jax


RESULTS = pathlib.Path(__file__).parent / "results"


def machine() -> dict:
    """The machine and the versions behind a figure."""
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


class Recorder:
    """Prints a line a row, and keeps the rows for a file."""

    def __init__(self, command: str):
        self.head = machine() | {"command": command}
        self.rows: list[dict] = []

    def add(self, **row) -> None:
        self.rows.append(row)

    def keep(self, name: str, wanted: Callable[[dict], bool]) -> None:
        """Takes over rows of the file that `write` would replace, and who measured them."""
        if not self._path(name).exists():
            return
        head, *rows = map(json.loads, self._path(name).read_text().splitlines())
        rows = [row for row in rows if wanted(row)]
        if rows:
            earlier = head.pop("kept", [])
            self.head["kept"] = [*earlier, {**head, "rows": len(rows)}]
        self.rows = [*rows, *self.rows]

    def write(self, name: str) -> pathlib.Path:
        """One JSON object a line, the first saying where it was measured."""
        RESULTS.mkdir(exist_ok=True)
        path = self._path(name)
        lines = [json.dumps(self.head), *(json.dumps(row) for row in self.rows)]
        path.write_text("\n".join(lines) + "\n")
        return path

    def _path(self, name):
        return RESULTS / f"{name}-jax{jax.__version__}.jsonl"


def alternate(sides: dict, repeats: int, sample: float = 0.1) -> dict[str, list[float]]:
    """Seconds a call of each function, the functions in turn.

    So noise falls on all alike. A sample is as many calls as take `sample` seconds, so
    that an interruption weighs as much on a short function as on a long one. A GPU is given
    the calls of a sample together: what it takes to launch one would hide a short function.
    """
    queued = jax.default_backend() == "gpu"

    def take(run, calls):
        start, result = time.perf_counter(), None
        for _ in range(calls):
            result = run()
            if not queued:
                jax.block_until_ready(result)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    calls = {}
    for name, run in sides.items():
        jax.block_until_ready(run())
        calls[name] = max(1, round(sample / take(run, 3)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            times[name].append(take(run, calls[name]))
    return times


def spread(times: list[float]) -> str:
    """Median, and the range, in milliseconds."""
    low, middle, high = min(times), statistics.median(times), max(times)
    return f"{1e3 * middle:.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f})"


def say(line: str = "") -> None:
    print(line, flush=True)
