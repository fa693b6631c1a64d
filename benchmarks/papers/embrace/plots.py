"""The plots of `benchmarks.papers.embrace.network`: EmbRace's figures 7 and 8."""

import statistics

import numpy as np
from matplotlib.figure import Figure

from benchmarks.harness import figure


def draw(rows: list[dict]) -> Figure:
    """Steps a second by hosts, and below them the stall: a column for each task."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    image, panels = figure.panels(2, len(tasks))
    for column, task in zip(panels.T, tasks, strict=True):
        of_task = [row for row in rows if row["task"] == task]
        hosts = sorted({row["hosts"] for row in of_task})
        names = list(dict.fromkeys(row["scheme"] for row in of_task))
        for number, name in enumerate(names):
            own = [row for row in of_task if row["scheme"] == name]
            at = np.array([hosts.index(row["hosts"]) for row in own])
            at = at + (number - (len(names) - 1) / 2) * 0.8 / len(names)
            middle = [1 / statistics.median(row["seconds"]) for row in own]
            ends = [
                [m - 1 / max(row["seconds"]) for m, row in zip(middle, own, strict=True)],
                [1 / min(row["seconds"]) - m for m, row in zip(middle, own, strict=True)],
            ]
            width = 0.8 / len(names)
            column[0].bar(at, middle, width, yerr=ends, capsize=2, label=name)
            stall = [1e3 * max(row["stall"], 0) for row in own]
            column[1].bar(at, stall, width, label=name)
        for axes, label in zip(column, ("steps a second", "stall, ms"), strict=True):
            axes.set_xticks(range(len(hosts)), [f"{count} hosts" for count in hosts])
            axes.set(ylabel=label, title=f"{task}, {of_task[0]['rate']}")
            axes.legend(fontsize=6)
        column[1].set_yscale("log")
    return image
