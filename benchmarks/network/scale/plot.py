"""The times of the extension, over the number of hosts."""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import figure


def drawn(rows: Sequence[dict], gbits: Sequence[int]) -> Any:
    """A panel for each kind of work, array and rate; a line and a range for each side."""
    groups = list(dict.fromkeys((row["work"], row["workload"]) for row in rows))
    image, panels = figure.panels(len(groups), len(gbits), size=(4.6, 3.4))
    sides = list(dict.fromkeys(row["scheme"] for row in rows))
    colors = {side: f"C{i}" for i, side in enumerate(sides)} | {"all-reduce": "C0"}
    for line, (work, workload) in zip(panels, groups, strict=True):
        for axes, gbit in zip(line, gbits, strict=True):
            about = (work, workload, gbit)
            here = [
                row
                for row in rows
                if (row["work"], row["workload"], row["gbit_per_s"]) == about
            ]
            for side in dict.fromkeys(row["scheme"] for row in here):
                some = [row for row in here if row["scheme"] == side]
                hosts, color = [row["hosts"] for row in some], colors[side]
                axes.loglog(
                    hosts, [row["seconds"] for row in some], label=side, color=color, base=2
                )
                ends = ([row[end] for row in some] for end in ("low_s", "high_s"))
                axes.fill_between(hosts, *ends, color=color, alpha=0.12)
            axes.set_yscale("log", base=10)
            axes.set(xlabel="hosts", ylabel="seconds")
            axes.set_title(f"{work}: {workload}, {gbit} Gbit/s", fontsize=9)
            axes.legend(fontsize=6)
    return image
