"""Losses of the examples after the same steps, densely and by every system that applies.

    python -m benchmarks.workloads accuracy
    python -m benchmarks.workloads accuracy --examples digits_vgg --seeds 0

Each example runs as a user runs it, on simulated devices, with `--json`, once for each
seed; EmbRace's hybrid communication, which the examples have not, runs by `by_columns`. A
row a run is kept in the result file as soon as there is one, and a run that has its row
there is not repeated: a recording that was broken off goes on. Nothing is timed.
"""

import dataclasses
import importlib
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import settings, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.workloads.by_columns import COLUMNS as HAS_COLUMNS, NAME as EMBRACE
from benchmarks.workloads.options import folder_of
from benchmarks.workloads.papers import FIGURES


NAME = "workloads-accuracy"
KEYS = ("example", "scheme", "seed", "steps", "devices")
EXAMPLES = tuple(FIGURES)
# What of an example's figures is kept.
KEPT = (
    *("final_loss", "accuracy", "held_out_loss", "wire_bytes", "payload_bytes"),
    *("dense_bytes", "replicas_equal", "largest_loss_difference"),
)


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Trains the examples densely and by every system, from several seeds."""

    PROGRAM = "benchmarks.workloads accuracy"
    examples: tuple[str, ...] = option(EXAMPLES, choices=EXAMPLES)
    systems: tuple[str, ...] = option((), "all that apply, the default, or some")
    seeds: tuple[int, ...] = option((0, 1, 2), "of parameters and batches")
    steps: int = option(100, "of each run")
    devices: int = option(8, "simulated ones")
    out: str | None = option(None, "a folder for the results, not benchmarks/results")


def systems(example: str) -> list[str]:
    """The systems that apply to an example, the dense one first."""
    syncs = [*importlib.import_module(f"examples.{example}").SYNCS]
    return syncs + [EMBRACE] * (example in HAS_COLUMNS)


def main(argv: list[str] | None = None) -> int:
    settings = Settings.parse(argv)
    record = Recorder(NAME, settings.command(), KEYS, folder_of(settings.out))
    done = {tuple(row[key] for key in KEYS) for row in record.kept()}
    for example in settings.examples:
        for seed in settings.seeds:
            run = (seed, settings.steps, settings.devices)
            wanted = [s for s in systems(example) if s in (settings.systems or [s])]
            wanted = [s for s in wanted if (example, s, *run) not in done]
            for programs in ([s for s in wanted if s != EMBRACE], [EMBRACE]):
                if set(programs) & set(wanted):
                    say(f"{example}, seed {seed}: {', '.join(programs)}")
                    record.rows += trained(example, programs, *run)
                    record.write()
    rows = [row for row in record.all_rows() if row["example"] in settings.examples]
    table.show(means(rows), COLUMNS, "Losses after the same steps: mean and spread")
    say(f"\nwritten: {record.write()}")
    return 0 if all(row["replicas_equal"] for row in rows) else 1


def trained(
    example: str, names: Sequence[str], seed: int, steps: int, devices: int
) -> list[dict]:
    """A row for each system, from a run of the example's own command."""
    options = ["--steps", str(steps), "--seed", str(seed), "--devices", str(devices)]
    program = [f"examples.{example}", "--sync", *names]
    if list(names) == [EMBRACE]:
        program = ["benchmarks.workloads.by_columns", example]
    command = [sys.executable, "-m", *program, *options, "--json"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(ran.stdout.splitlines()[-1])
    run = {"example": example, "seed": seed, "steps": steps, "devices": devices}
    origin = {"sha256": figures.get("sha256"), "ranks": figures["devices"]}
    return [run | {"scheme": name} | _kept(figures[name]) | origin for name in names]


def _kept(figures: dict[str, Any]) -> dict[str, Any]:
    assert figures["steps"] > 0
    return {key: figures[key] for key in KEPT if key in figures}


def means(rows: Sequence[dict]) -> list[dict]:
    """A row for each example and system, with the losses of all its seeds."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        of = (row["example"], row["scheme"], row["steps"], row["devices"])
        groups.setdefault(of, []).append(row)
    made = []
    for (example, scheme, steps, devices), runs in groups.items():
        row = {"example": example, "scheme": scheme, "steps": steps, "devices": devices}
        for key in ("final_loss", "accuracy", "held_out_loss"):
            found = [run[key] for run in runs if key in run]
            row[key] = found if len(found) == len(runs) else None
        row["wire_bytes"] = statistics.fmean(run["wire_bytes"] for run in runs)
        made.append(row)
    return made


def spread(values: Sequence[float] | None, places: int = 4) -> str:
    """The mean and the standard deviation of several runs."""
    if not values:
        return "-"
    deviation = statistics.pstdev(values)
    return f"{statistics.fmean(values):.{places}f} ± {deviation:.{places}f}"


COLUMNS = [
    Column("example", "example"),
    Column("system", "scheme"),
    Column("loss", lambda row: spread(row["final_loss"])),
    Column("held out", lambda row: spread(row["held_out_loss"])),
    Column("accuracy", lambda row: spread(row["accuracy"])),
    Column("bytes a step", "wire_bytes", ",.0f"),
]


if __name__ == "__main__":
    sys.exit(main())
