"""Draws the predicted time of a step by its parts, beside the time of its bytes."""

from benchmarks.device.costs import RATES
from benchmarks.harness import figure


PARTS = {"launching": "#4c72b0", "waiting": "#dd8452", "moving": "#55a868"}


def draw(rows: list[dict]) -> None:
    """A panel for each array: bars by scheme, and lines of the bytes' time at each rate."""
    loads = list(dict.fromkeys(row["load"] for row in rows))
    drawing, axes = figure.panels(across=len(loads))
    for axis, load in zip(axes[0], loads, strict=True):
        here = [row for row in rows if row["load"] == load]
        below = [0.0] * len(here)
        for part, colour in PARTS.items():
            heights = [1e3 * row["seconds"][part] for row in here]
            axis.bar(range(len(here)), heights, bottom=below, color=colour, label=part)
            below = [a + b for a, b in zip(below, heights, strict=True)]
        for i, (rate, mark) in enumerate(zip(RATES, "_x+", strict=True)):
            times = [1e3 * row["wire"][i] for row in here]
            label = f"its bytes at {rate} Gbit/s"
            axis.scatter(range(len(here)), times, color="black", marker=mark, label=label)
        axis.set_xticks(range(len(here)), [row["scheme"] for row in here])
        axis.set_yscale("log")
        axis.set_title(load)
        axis.set_ylabel("ms")
    axes[0][0].legend(fontsize=7)
    figure.save("device", figure=drawing)
