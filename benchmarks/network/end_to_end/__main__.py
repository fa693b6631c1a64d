"""Starts the hosts, and makes the table of what they report."""

import dataclasses
import math
import statistics
import sys
import tempfile

from benchmarks.data import clicks
from benchmarks.harness import figure, sides, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.table import Column
from benchmarks.network.end_to_end import tasks
from benchmarks.network.end_to_end.options import Settings
from benchmarks.testbed import network, ranks


# How far losses of equal training may be apart: sums are taken in another order.
LOSS = 1e-3
KEYS = ("task", "about", "hosts", "rate", "scheme")


def main(argv: list[str] | None = None) -> int:
    settings = Settings.parse(argv)
    record = Recorder("end-to-end", settings.command(), KEYS)
    for task in settings.tasks:
        for hosts in settings.hosts:
            with tempfile.TemporaryDirectory() as folder:
                this = dataclasses.replace(settings, task=task, data=folder)
                rows = _measured(hosts, this)
            if not rows:
                return 1
            dense = _step(rows[0]) if rows[0]["scheme"] == "dense" else None
            for row in rows:
                row["about"] = _about(this)
                # PyTorch's optimizer is another one.
                apart = abs(row["loss"] - rows[0]["loss"])
                row["agrees"] = apart <= LOSS or row["scheme"].startswith("PyTorch")
                row["gain"] = dense and dense / _step(row)
            title = f"{task}: {_about(this)}; {hosts} hosts, {rows[0]['rate']}"
            table.show(rows, COLUMNS, title)
            record.rows += rows
            say(f"\nwritten: {record.write()} and .csv")
    figure.save("end-to-end", [_line(row) for row in record.all_rows()])
    return 0 if all(row["replicas_equal"] and row["agrees"] for row in record.rows) else 1


def _measured(hosts: int, settings: Settings) -> list[dict]:
    """A row for each side; none if a rank failed."""
    tasks.write(settings, hosts)
    rows = []
    with network.hosts(hosts, settings.rate) as net:
        module = "benchmarks.network.end_to_end"
        programs = [(sys.executable, f"{module}.jax_ranks")]
        if settings.peers:
            programs.append((settings.peers, f"{module}.torch_ranks"))
        for python, program in programs:
            reported = ranks.run(
                program, settings, hosts, net, settings.timeout, python, settings.data
            )
            if reported is None:
                return []
            rows += [sides.together(hosts, of_ranks) for of_ranks in reported]
    return rows


def _about(settings):
    """What a row says of its task."""
    if settings.task == "language":
        return f"tables of {settings.width} columns"
    about = f"{settings.rows:,} rows, {settings.ids} ids"
    if settings.examples != clicks.BATCH:
        about += f", {settings.examples:,} examples a host"
    return about


def _step(row):
    return statistics.median(row["seconds"])


def _complaint(row):
    complaints = ["REPLICAS DIFFER"] * (not row["replicas_equal"])
    return ", ".join(complaints + ["LOSS DIFFERS"] * (not row["agrees"]))


def _line(row: dict) -> dict:
    """The row's line of the CSV file."""
    return {
        "task": row["task"],
        "about": row["about"],
        "hosts": row["hosts"],
        "rate": row["rate"],
        "side": row["scheme"],
        "seconds_a_step": _step(row),
        "cpu_s": row["cpu"],
        "bytes": row["sent"],
        "loss": row["loss"],
    }


COLUMNS = [
    Column("side", "scheme"),
    Column("steps/s", lambda row: 1 / _step(row), ".3f"),
    Column("x dense", lambda row: row["gain"] or math.nan, ".2f"),
    Column("cpu ms", "cpu", ".0f", 1e3),
    Column("MB sent", "sent", ".2f", 1e-6),
    Column("loss", "loss", ".4f"),
    Column("", _complaint),
]


if __name__ == "__main__":
    sys.exit(main())
