"""Draws what `benchmarks.zen_analysis` found: a PNG and the CSV behind it, each figure."""

import csv
import itertools
import pathlib

import jax
import matplotlib
import numpy as np


matplotlib.use("Agg")

import matplotlib.pyplot as plt
import matplotlib.ticker


def draw(found: dict, folder: pathlib.Path) -> None:
    figure2(found["overlap"], folder)
    figure3(found["skew"], folder)
    figure8(found["schemes"], folder)
    figure15(found["formats"], folder)


def figure2(found: dict, folder: pathlib.Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    rows = []
    edges = np.linspace(0, 1, 51)
    for name, own in found.items():
        heights, _ = np.histogram(own["overlaps"], edges, density=True)
        middles = (edges[1:] + edges[:-1]) / 2
        left.plot(middles, heights, label=f"{name}, density {own['density']:.1%}")
        rows += [("a", name, *pair) for pair in zip(middles, heights, strict=True)]
        counts, ratios = [1, *own["counts"]], [1.0, *own["densification"]]
        right.plot(counts, ratios, "o-", label=name)
        rows += [("b", name, *pair) for pair in zip(counts, ratios, strict=True)]
    left.set(xlabel="overlap ratio of two ranks", ylabel="probability density")
    left.axvline(0.05, color="gray", linestyle=":")
    left.text(
        0.055, left.get_ylim()[1] * 0.97, "paper: well above 0.05", va="top", fontsize=8
    )
    left.set_title("(a) overlap of pairs")
    left.legend(fontsize=8)
    most = max(max(own["counts"]) for own in found.values())
    right.plot([1, most], [1, most], ":", color="gray", label="no overlap, n")
    _by_two(right)
    right.set(xlabel="ranks n", ylabel="densification ratio")
    right.set_title("(b) density of the sum over that of one rank")
    right.legend(fontsize=8)
    figure.suptitle("Overlap of embedding gradients (Zen, figure 2)")
    _save(figure, folder, "zen-figure2", ("panel", "sets", "x", "y"), rows)


def figure3(found: dict, folder: pathlib.Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    shares = np.array([own["shares"] for own in found.values()])
    image = left.imshow(shares, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    for (row, column), share in np.ndenumerate(shares):
        color = "black" if share > 0.5 else "white"
        left.text(column, row, f"{share:.0%}", ha="center", va="center", color=color)
    left.set_yticks(range(len(found)), list(found), fontsize=8)
    left.set_xticks(range(shares.shape[1]), range(1, shares.shape[1] + 1))
    left.set(xlabel="range of words, the most frequent first")
    left.set_title("(a) share of non-zeros (paper: over 60% in the first)")
    figure.colorbar(image, ax=left)
    rows = []
    for name, own in found.items():
        rows += [("a", name, k, share) for k, share in enumerate(own["shares"], start=1)]
        right.plot(own["counts"], own["skewness"], "o-", label=name)
        pairs = zip(own["counts"], own["skewness"], strict=True)
        rows += [("b", name, *pair) for pair in pairs]
    right.plot([2, 128], [2, 128], ":", color="gray", label="all in one range")
    right.plot([128], [70], "k*", markersize=10, label="paper, LSTM: over 70")
    _by_two(right)
    right.set(xlabel="ranges", ylabel="skewness ratio")
    right.set_title("(b) densest range over all")
    right.legend(fontsize=8)
    figure.suptitle("Skew of embedding gradients (Zen, figure 3)")
    _save(figure, folder, "zen-figure3", ("panel", "sets", "x", "y"), rows)


def figure8(found: dict, folder: pathlib.Path) -> None:
    names = list(dict.fromkeys(name for name, _ in found))
    figure, axes = plt.subplots(
        len(names),
        2,
        figsize=(12, 4.6 * len(names)),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    rows = []
    for ((name, unit), own), place in zip(found.items(), axes.flat, strict=True):
        styles = itertools.cycle(["o-", "s-", "^-", "v-", "D--", "x--"])
        for scheme, times in own["times"].items():
            style = "k-" if scheme == "all-reduce" else next(styles)
            wide = 2.5 if scheme in ("Zen", "Balanced Parallelism") else 1.2
            place.plot(own["counts"], times, style, label=scheme, lw=wide, markersize=4)
            pairs = zip(own["counts"], times, strict=True)
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
    figure.legend(handles, labels, loc="outside right center", fontsize=9)
    figure.suptitle("Time to add up the input embedding's gradients (Zen, figure 8)")
    header = ("sets", "unit", "scheme", "ranks", "relative_time")
    _save(figure, folder, "zen-figure8", header, rows)


def figure15(found: dict, folder: pathlib.Path) -> None:
    figure, place = plt.subplots(figsize=(7.5, 5), layout="constrained")
    colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for name, color in zip(found["names"], colors, strict=False):
        for kind, style in (("random", "-"), ("model", "o")):
            own = [row for row in found["rows"] if row["sets"] == kind]
            label = name if kind == "random" else None
            densities = [row["density"] for row in own]
            place.plot(
                densities, [row[name] for row in own], style, color=color, label=label,
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
    header = ("sets", "density", *found["names"])
    rows = [[row[key] for key in header] for row in found["rows"]]
    _save(figure, folder, "zen-figure15", header, rows)


def _by_two(place) -> None:
    """Both axes in powers of two, in plain numbers."""
    for axis, scale in ((place.xaxis, place.set_xscale), (place.yaxis, place.set_yscale)):
        scale("log", base=2)
        axis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))


def _save(figure, folder: pathlib.Path, stem: str, header, rows) -> None:
    path = folder / f"{stem}-jax{jax.__version__}"
    with open(f"{path}.csv", "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    figure.savefig(f"{path}.png", dpi=110)
    plt.close(figure)
