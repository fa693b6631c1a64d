"""Loss over wall-clock on 16 hosts of a limited network, dense beside ours.

    python -m benchmarks.workloads curves

All sides train from the same parameters on the same batches, a few steps each in turn, and
each side's clock runs in its own turns alone. It starts behind the first step, which
compiles. The loss is a mean of the last steps, those of all sides alike, as a single
step's jumps about. Prints the time to the loss with which the dense run ends as a share of
the time that the dense run takes for it; writes a CSV file and a plot.
"""

import dataclasses
import statistics
import sys
from collections.abc import Sequence

from benchmarks.harness import figure, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.table import Column
from benchmarks.testbed import network, ranks
from benchmarks.workloads.options import CurveSettings, folder_of


NAME = "workloads-curves"
KEYS = ("example", "hosts", "rate", "numbers", "scheme")
WINDOW = 5  # steps whose losses are averaged
TARGET = 1 / 3  # of the time of the dense run


def main(argv: list[str] | None = None) -> int:
    settings = CurveSettings.parse(argv)
    folder = folder_of(settings.out)
    record = Recorder(NAME, settings.command(), KEYS, folder)
    for example in settings.examples:
        for hosts in settings.hosts:
            this = dataclasses.replace(settings, task=example)
            rows = compared(measured(hosts, this))
            if not rows:
                return 1
            title = f"{example}, {hosts} hosts, {rows[0]['rate']}, {settings.steps} steps"
            table.show(rows, COLUMNS, title)
            say(f"To be at most {TARGET:.2f} of dense.")
            record.rows += rows
            say(f"\nwritten: {record.write()}, .csv and .png")
    rows = record.all_rows()
    figure.save(NAME, [line for row in rows for line in lines(row)], draw(rows), folder)
    return 0 if all(row["replicas_equal"] for row in record.rows) else 1


def measured(hosts: int, settings: CurveSettings) -> list[dict]:
    """A row for each side; none if a rank failed."""
    say(f"\n{settings.task}, {hosts} hosts")
    with network.hosts(hosts, settings.rate) as net:
        reported = ranks.run(
            "benchmarks.workloads.hosts.curves", settings, hosts, net, settings.timeout
        )
    return [of_ranks[0] | {"hosts": hosts} for of_ranks in reported or ()]


def smooth(losses: Sequence[float]) -> list[float | None]:
    """After each step the mean of the last few losses; None where there are too few."""
    means = []
    for step in range(1, len(losses) + 1):
        last = losses[max(0, step - WINDOW) : step]
        means.append(statistics.fmean(last) if len(last) == WINDOW else None)
    return means


def reached(row: dict, loss: float) -> float | None:
    """Seconds until a run's smooth loss is this or less; None if it never is."""
    for seconds, mean in zip(row["elapsed"], smooth(row["losses"]), strict=True):
        if mean is not None and mean <= loss:
            return seconds
    return None


def compared(rows: list[dict]) -> list[dict]:
    """The rows with the time to the dense run's last loss, and its share of dense's."""
    dense = next((row for row in rows if row["scheme"] == "dense"), None)
    if dense is None:
        return rows
    last = smooth(dense["losses"])[-1]
    if last is None:
        raise SystemExit(f"A curve takes {WINDOW} steps or more: raise --steps.")
    # Sums in other orders: the last digits of a loss are nobody's gain.
    last += 1e-3 * abs(last)
    for row in rows:
        row["reached"] = reached(row, last)
        taken = reached(dense, last)
        row["share"] = row["reached"] and taken and row["reached"] / taken
    return rows


def lines(row: dict) -> list[dict]:
    """The row's lines of the CSV file, one a step."""
    of = {key: row[key] for key in ("example", "hosts", "rate", "scheme")}
    each = zip(row["elapsed"], row["losses"], strict=True)
    return [
        of | {"step": step, "seconds": round(seconds, 4), "loss": loss}
        for step, (seconds, loss) in enumerate(each, start=1)
    ]


def draw(rows: Sequence[dict]):
    """A panel for each example: smooth loss over seconds."""
    groups = list(dict.fromkeys((row["example"], row["hosts"]) for row in rows))
    image, panels = figure.panels(1, len(groups))
    for axes, (example, hosts) in zip(panels[0], groups, strict=True):
        own = [row for row in rows if (row["example"], row["hosts"]) == (example, hosts)]
        for row in own:
            pairs = zip(row["elapsed"], smooth(row["losses"]), strict=True)
            seconds, means = zip(*((s, m) for s, m in pairs if m is not None), strict=True)
            axes.plot(seconds, means, label=row["scheme"])
        title = f"{example.replace('_', ' ')}, {hosts} hosts, {own[0]['rate']}"
        axes.set(xlabel="seconds", ylabel=f"loss, mean of {WINDOW} steps", title=title)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return image


COLUMNS = [
    Column("system", "scheme"),
    Column("s a step", lambda row: row["elapsed"][-1] / len(row["elapsed"]), ".3f"),
    Column("last loss", lambda row: smooth(row["losses"])[-1], ".4f"),
    Column("s to dense's last loss", "reached", ".1f"),
    Column("share of dense's", "share", ".2f"),
    Column("", lambda row: "" if row["replicas_equal"] else "REPLICAS DIFFER"),
]


if __name__ == "__main__":
    sys.exit(main())
