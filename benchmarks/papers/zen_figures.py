"""The figures of `benchmarks.papers.zen_analysis`: a PNG and a CSV for each."""

import itertools
import pathlib

import matplotlib
import matplotlib.ticker
import numpy as np

from benchmarks.harness import figure


def draw(measured: dict, folder: pathlib.Path | None) -> None:
    """Draws all figures, into benchmarks/results without a folder."""
    figure2(measured["overlap"], folder)
    figure3(measured["skew"], folder)
    figure8(measured["schemes"], folder)
    figure15(measured["formats"], folder)


def figure2(measured: dict, folder: pathlib.Path | None) -> None:
    image, ((left, right),) = figure.panels(1, 2, (5.5, 4.2))
    rows = []
    edges = np.linspace(0, 1, 51)
    for name, numbers in measured.items():
        heights, _ = np.histogram(numbers["overlaps"], edges, density=True)
        middles = (edges[1:] + edges[:-1]) / 2
        left.plot(middles, heights, label=f"{name}, density {numbers['density']:.1%}")
        rows += [("a", name, *pair) for pair in zip(middles, heights, strict=True)]
        counts, ratios = [1, *numbers["counts"]], [1.0, *numbers["densification"]]
        right.plot(counts, ratios, "o-", label=name)
        rows += [("b", name, *pair) for pair in zip(counts, ratios, strict=True)]
    left.set(xlabel="overlap ratio of two ranks", ylabel="probability density")
    left.axvline(0.05, color="gray", linestyle=":")
    left.text(
        0.055, left.get_ylim()[1] * 0.97, "paper: well above 0.05", va="top", fontsize=8
    )
    left.set_title("(a) overlap of pairs")
    left.legend(fontsize=8)
    most = max(max(numbers["counts"]) for numbers in measured.values())
    right.plot([1, most], [1, most], ":", color="gray", label="no overlap, n")
    _by_two(right)
    right.set(xlabel="ranks n", ylabel="densification ratio")
    right.set_title("(b) density of the sum over that of one rank")
    right.legend(fontsize=8)
    image.suptitle("Overlap of embedding gradients (Zen, figure 2)")
    _save(image, folder, "zen-figure2", ("panel", "sets", "x", "y"), rows)


def figure3(measured: dict, folder: pathlib.Path | None) -> None:
    image, ((left, right),) = figure.panels(1, 2, (5.5, 4.2))
    shares = np.array([numbers["shares"] for numbers in measured.values()])
    shown = left.imshow(shares, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    for (row, column), share in np.ndenumerate(shares):
        color = "black" if share > 0.5 else "white"
        left.text(column, row, f"{share:.0%}", ha="center", va="center", color=color)
    left.set_yticks(range(len(measured)), list(measured), fontsize=8)
    left.set_xticks(range(shares.shape[1]), range(1, shares.shape[1] + 1))
    left.set(xlabel="range of words, the most frequent first")
    left.set_title("(a) share of non-zeros (paper: over 60% in the first)")
    image.colorbar(shown, ax=left)
    rows = []
    for name, numbers in measured.items():
        rows += [
            ("a", name, k, share) for k, share in enumerate(numbers["shares"], start=1)
        ]
        right.plot(numbers["counts"], numbers["skewness"], "o-", label=name)
        pairs = zip(numbers["counts"], numbers["skewness"], strict=True)
        rows += [("b", name, *pair) for pair in pairs]
    right.plot([2, 128], [2, 128], ":", color="gray", label="all in one range")
    right.plot([128], [70], "k*", markersize=10, label="paper, LSTM: over 70")
    _by_two(right)
    right.set(xlabel="ranges", ylabel="skewness ratio")
    right.set_title("(b) densest range over all")
    right.legend(fontsize=8)
    image.suptitle("Skew of embedding gradients (Zen, figure 3)")
    _save(image, folder, "zen-figure3", ("panel", "sets", "x", "y"), rows)


def figure8(measured: dict, folder: pathlib.Path | None) -> None:
    names = list(dict.fromkeys(name for name, _ in measured))
    image, axes = figure.panels(len(names), 2, (6, 4.6), sharey=True)
    rows = []
    for ((name, unit), numbers), place in zip(measured.items(), axes.flat, strict=True):
        styles = itertools.cycle(["o-", "s-", "^-", "v-", "D--", "x--"])
        for scheme, times in numbers["times"].items():
            style = "k-" if scheme == "all-reduce" else next(styles)
            wide = 2.5 if scheme in ("Zen", "Balanced Parallelism") else 1.2
            place.plot(numbers["counts"], times, style, label=scheme, lw=wide, markersize=4)
            pairs = zip(numbers["counts"], times, strict=True)
            rows += [(name, unit, scheme, *pair) for pair in pairs]
        if unit == "element":
            place.plot([128], [0.64], "k*", markersize=11, label="paper's NMT: 0.64")
            place.axvline(
                40, color="gray", linestyle=":", label="paper: AGsparse reaches 1 at 40"
            )
        _by_two(place)
        place.set(xlabel="ranks", ylabel="time relative to all-reduce")
        index = "an index an element" if unit == "element" else "an index a row"
        place.set_title(f"{name} a rank, {index}", fontsize=10)
        place.grid(alpha=0.3)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    image.legend(handles, labels, loc="outside right center", fontsize=9)
    image.suptitle("Time to add up the input embedding's gradients (Zen, figure 8)")
    header = ("sets", "unit", "scheme", "ranks", "relative_time")
    _save(image, folder, "zen-figure8", header, rows)


def figure15(measured: dict, folder: pathlib.Path | None) -> None:
    image, ((place,),) = figure.panels(size=(7.5, 5))
    colors = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    for name, color in zip(measured["names"], colors, strict=False):
        for kind, style in (("random", "-"), ("model", "o")):
            numbers = [row for row in measured["rows"] if row["sets"] == kind]
            label = name if kind == "random" else None
            densities = [row["density"] for row in numbers]
            place.plot(
                densities, [row[name] for row in numbers], style, color=color, label=label,
                markersize=4,
            )  # fmt: skip
    place.plot([], [], "o", color="gray", label="the model's sets, 1 to all ranks")
    place.axhline(1, color="black", lw=1, linestyle="--", label="dense")
    place.axvline(0.95, color="gray", linestyle=":")
    place.text(0.9, 0.012, "paper: hash bitmap\nbelow dense at 95%", ha="right", fontsize=8)
    place.set_xscale("log")
    place.set_yscale("log")
    place.set(xlabel="density of the sum", ylabel="bytes relative to the dense tensor")
    place.set_title("Formats of what 16 servers send back (Zen, figure 15a)")
    place.legend(fontsize=8)
    header = ("sets", "density", *measured["names"])
    rows = [[row[key] for key in header] for row in measured["rows"]]
    _save(image, folder, "zen-figure15", header, rows)


def _by_two(place) -> None:
    """Both axes in powers of two, in plain numbers."""
    for axis, scale in ((place.xaxis, place.set_xscale), (place.yaxis, place.set_yscale)):
        scale("log", base=2)
        axis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))


def _save(image, folder: pathlib.Path | None, name: str, header, rows) -> None:
    lines = [dict(zip(header, row, strict=True)) for row in rows]
    figure.save(name, lines, image, folder)
