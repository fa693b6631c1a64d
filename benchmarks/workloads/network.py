"""Steps a second of the examples on hosts of a limited network, all systems in turn.

    python -m benchmarks.workloads network --peers PYTHON
    python -m benchmarks.workloads network --examples click_model --hosts 4 --rows 1000000

One process a host. Losses of runs that leave nothing out must agree with those of dense
gradients, and parameters must be the same bytes on all ranks. PyTorch's sides come right
after them on the same network, from the same parameters and on the same batches: its
DistributedDataParallel over gloo, with dense and with sparse embeddings.
"""

import dataclasses
import statistics
import sys
import tempfile

from benchmarks.harness import sides, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.table import Column
from benchmarks.testbed import network, ranks
from benchmarks.workloads import papers
from benchmarks.workloads.options import LOSSY, WITH_TABLES, Settings, folder_of


NAME = "workloads-network"
KEYS = ("example", "hosts", "rate", "numbers", "scheme")
# How far losses of the same steps may be apart, over the loss: sums have other orders.
LOSS = 1e-3
TORCH_SPARSE = "PyTorch, sparse"  # whose SparseAdam takes other steps


def main(argv: list[str] | None = None) -> int:
    settings = Settings.parse(argv)
    record = Recorder(NAME, settings.command(), KEYS, folder_of(settings.out))
    for example in settings.examples:
        for hosts in settings.hosts:
            with tempfile.TemporaryDirectory() as folder:
                this = dataclasses.replace(settings, task=example, data=folder)
                rows = compared(measured(hosts, this))
            if not rows:
                return 1
            table.show(rows, COLUMNS, f"{example}, {hosts} hosts, {rows[0]['rate']}")
            say(papers.line(example))
            record.rows += rows
            say(f"\nwritten: {record.write()}")
    return 1 if any(complaint(row) for row in record.rows) else 0


def measured(hosts: int, settings: Settings) -> list[dict]:
    """A row for each side; none if a rank failed."""
    say(f"\n{settings.task}, {hosts} hosts")
    programs = [(sys.executable, "benchmarks.workloads.hosts.training")]
    if settings.peers and settings.task in WITH_TABLES:
        programs.append((settings.peers, "benchmarks.workloads.hosts.torch_training"))
    rows = []
    with network.hosts(hosts, settings.rate) as net:
        for python, program in programs:
            reported = ranks.run(
                program, settings, hosts, net, settings.timeout, python, settings.data
            )
            if reported is None:
                return []
            rows += [sides.together(hosts, of_ranks) for of_ranks in reported]
    return rows


def compared(rows: list[dict]) -> list[dict]:
    """The rows with what they are compared by: dense, where it was measured."""
    dense = next((row for row in rows if row["scheme"] == "dense"), None)
    if dense is None:
        return rows
    for row in rows:
        row["gain"] = step(dense) / step(row)
        apart = abs(row["loss"] - dense["loss"])
        row["agrees"] = row["scheme"] in (*LOSSY, TORCH_SPARSE) or bool(
            apart <= LOSS * abs(dense["loss"])
        )
    return rows


def step(row: dict) -> float:
    """Seconds of a step."""
    return statistics.median(row["seconds"])


def complaint(row: dict) -> str:
    """What is wrong with a row."""
    complaints = ["REPLICAS DIFFER"] * (not row["replicas_equal"])
    return ", ".join(complaints + ["LOSS DIFFERS"] * (not row.get("agrees", True)))


COLUMNS = [
    Column("system", "scheme"),
    Column("steps/s", lambda row: 1 / step(row), ".3f"),
    Column("from", lambda row: 1 / max(row["seconds"]), ".3f"),
    Column("to", lambda row: 1 / min(row["seconds"]), ".3f"),
    Column("x dense", "gain", ".2f"),
    Column("cpu ms", "cpu", ".0f", 1e3),
    Column("net ms", "network", ".0f", 1e3),
    Column("MB sent", "sent", ".2f", 1e-6),
    Column("loss", "loss", ".4f"),
    Column("", complaint),
]


if __name__ == "__main__":
    sys.exit(main())
