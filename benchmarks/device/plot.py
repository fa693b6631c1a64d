"""Draws the predicted time of a step by its parts, and the time of its bytes on a wire."""

from benchmarks.device.costs import RATES
from benchmarks.harness import figure


PARTS = {
    "launching": "#4c72b0",
    "waiting": "#dd8452",
    "moving": "#55a868",
    "computing": "#8172b3",
    "scattering": "#c44e52",
}


# An all-reduce takes almost no time on the device; the time of its bytes is in the title.
SCHEMES = ("zen", "agsparse")


def by_scheme(rows: list[dict], load: str) -> dict[str, dict]:
    """Returns the rows of a load by scheme, for steps with the default kernels."""
    here = [row for row in rows if row["load"] == load and not row.get("kernels")]
    return {row["scheme"]: row for row in here}


def draw(rows: list[dict]) -> None:
    """Draws a panel for each load: bars by scheme, marks for its bytes at each rate."""
    loads = list(dict.fromkeys(row["load"] for row in rows))
    drawing, axes = figure.panels(across=len(loads))
    for axis, load in zip(axes[0], loads, strict=True):
        of_load = by_scheme(rows, load)
        here = [of_load[scheme] for scheme in SCHEMES if scheme in of_load]
        below = [0.0] * len(here)
        for part, colour in PARTS.items():
            heights = [1e3 * row["seconds"].get(part, 0) for row in here]
            axis.bar(range(len(here)), heights, 0.5, bottom=below, color=colour, label=part)
            below = [a + b for a, b in zip(below, heights, strict=True)]
        for i, (rate, mark) in enumerate(zip(RATES, "ovs", strict=True)):
            times = [1e3 * row["wire"][i] for row in here]
            label = f"its bytes at {rate} Gbit/s"
            style = {"color": "black", "marker": mark, "s": 18, "zorder": 3}
            axis.scatter(range(len(here)), times, label=label, **style)
        axis.set_xticks(range(len(here)), [row["scheme"] for row in here])
        axis.set_ylabel("ms a step")
        title = load
        if "all-reduce" in of_load:
            dense = 1e3 * of_load["all-reduce"]["wire"][0]
            title += f"\nall-reduce: {dense:.0f} ms of bytes at {RATES[0]} Gbit/s"
        axis.set_title(title, fontsize=9)
    axes[0][0].legend(fontsize=7)
    figure.save("device", figure=drawing)
