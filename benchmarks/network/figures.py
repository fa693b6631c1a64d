"""The figures of `benchmarks.network.communication`."""

import statistics

from matplotlib.figure import Figure

from benchmarks.harness import figure


def drawn(rows: list[dict], rate: str) -> Figure:
    """The speed of each side over that of psum, by workload and by hosts.

    Args:
        rows: As `benchmarks.network.communication` makes them.
        rate: Of the links.
    """
    rows = [row for row in rows if row["rate"] == rate]
    compared = {_case(row) for row in rows if row["scheme"] == "psum"}
    rows = [row for row in rows if _case(row) in compared]
    names = list(dict.fromkeys(row["workload"] for row in rows))
    most = max(row["hosts"] for row in rows)
    image, axes = figure.panels(2, -(-(len(names) + 1) // 2), (3.25, 3.5))
    panels = axes.reshape(-1)
    sides = list(dict.fromkeys(row["scheme"] for row in rows))
    colors = {side: f"C{i % 10}" for i, side in enumerate(sides)}
    for panel, name in zip(panels, names, strict=False):
        for side in sides:
            points = sorted(
                (row["hosts"], _gain(rows, row))
                for row in rows
                if (row["workload"], row["scheme"]) == (name, side)
            )
            if points and side != "psum":
                panel.plot(*zip(*points, strict=True), "o-", color=colors[side], label=side)
        panel.axhline(1, color="gray", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set(title=name, xlabel="hosts", ylabel="times as fast as psum")
    shown = [row for row in rows if row["hosts"] == most and row["workload"] == names[0]]
    last = panels[len(names)]
    for place, row in enumerate(shown):
        time = statistics.median(row["seconds"])
        last.barh(place, 1e3 * time, color="lightgray")
        last.barh(place, 1e3 * (row["network"] or 0), color=colors[row["scheme"]])
    last.set_yticks(range(len(shown)), [row["scheme"] for row in shown])
    last.set(
        xlabel="ms", title=f"{names[0]}, {most} hosts: network in colour", xscale="log"
    )
    for panel in panels[len(names) + 1 :]:
        panel.axis("off")
    panels[0].legend(fontsize=7)
    image.suptitle(f"Adding up sparse gradients, links of {rate} (Zen, figures 8 and 13)")
    return image


def _gain(rows, row):
    psum = next(
        other for other in rows if other["scheme"] == "psum" and _case(other) == _case(row)
    )
    return statistics.median(psum["seconds"]) / statistics.median(row["seconds"])


def _case(row):
    return row["workload"], row["hosts"]
