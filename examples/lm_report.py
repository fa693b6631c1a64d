"""The figures of the language model's runs, as a table and as a plot."""

from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import sparsejax
from examples.data.docstrings import Corpus


class Run(NamedTuple):
    """The results of one run.

    Attributes:
        losses: Of each step.
        sent: The metrics of `sparsejax.metrics`, averaged over the steps.
        params: The parameters at the end.
        replicas_equal: Whether all devices ended with the same bytes.
        compile_seconds: The time of the first step beyond that of the median one.
        step_seconds: The median step.
    """

    losses: list[float]
    sent: dict[str, float]
    params: dict[str, np.ndarray]
    replicas_equal: bool
    compile_seconds: float
    step_seconds: float


def origin(corpus: Corpus, mesh: Mesh) -> dict[str, Any]:
    """The data and the versions that the figures depend on."""
    return {
        "tokens": len(corpus.tokens),
        "vocabulary": len(corpus.words),
        "sha256": corpus.sha256,
        "versions": corpus.versions | {"sparsejax": sparsejax.__version__},
        "devices": mesh.size,
    }


def describe(console: Console, corpus: Corpus, mesh: Mesh, width: int) -> None:
    """Prints the size of the data and of the model, and the devices."""
    versions = ", ".join(f"{name} {version}" for name, version in corpus.versions.items())
    console.print(
        f"{len(corpus.tokens):,} words, {len(corpus.words):,} different; {versions}\n"
        f"SHA-256 of the text: {corpus.sha256}\n"
        f"Two tables of {len(corpus.words):,} x {width} and an LSTM, on {mesh.size} "
        "simulated devices",
        soft_wrap=True,
    )


def figures(runs: dict[str, Run]) -> dict[str, Any]:
    """The figures of all runs, and how far the others are from the first, the dense one."""
    names = iter(runs)
    dense = runs[next(names)]
    found: dict[str, Any] = {name: _figures(run) for name, run in runs.items()}
    for name in names:
        run = runs[name]
        groups = {key.rsplit("/", 1)[0] for key in run.sent if key.count("/") > 1}
        tables = max(groups, key=lambda group: run.sent[f"{group}/dense_bytes"])
        for key in ("density_before", "density_after", "push_imbalance", "pull_imbalance"):
            found[name][key] = run.sent[f"{tables}/{key}"]
        pairs = [(dense.params[leaf], run.params[leaf]) for leaf in dense.params]
        losses = np.abs(np.subtract(dense.losses, run.losses))
        found[name] |= {
            "largest_loss_difference": float(np.max(losses)),
            "largest_parameter_difference": float(
                max(np.max(np.abs(a - b)) for a, b in pairs)
            ),
            "parameters_bitwise_equal": all(a.tobytes() == b.tobytes() for a, b in pairs),
        }
    return found


def _figures(run: Run) -> dict[str, Any]:
    return {
        "steps": len(run.losses),
        "final_loss": run.losses[-1],
        "wire_bytes": run.sent["sync/wire_bytes"],
        "payload_bytes": run.sent["sync/payload_bytes"],
        "replicas_equal": run.replicas_equal,
        "compile_seconds": run.compile_seconds,
        "step_seconds": run.step_seconds,
    }


def show(console: Console, figures: dict[str, Any]) -> None:
    """Prints a table, and how to read it."""
    dense = figures["dense"]
    table = Table(title=f"{dense['steps']} steps, means over the steps")
    table.add_column("")
    for name in figures:
        table.add_column(name, justify="right")

    def row(what, key, text):
        sides = (text(side[key]) if key in side else "" for side in figures.values())
        table.add_row(what, *sides)

    yes_or_no = {True: "yes", False: "NO"}
    row("loss of the last step", "final_loss", "{:.4f}".format)
    row("bytes each rank sends in a step", "wire_bytes", "{:,.0f}".format)
    row("  of which needed", "payload_bytes", "{:,.0f}".format)
    less = (dense["wire_bytes"] / max(side["wire_bytes"], 1) for side in figures.values())
    table.add_row("  times less than dense", *map("{:.1f}".format, less))
    row("rows touched by the busiest rank", "density_before", "{:.2%}".format)
    row("rows touched by any rank", "density_after", "{:.2%}".format)
    row("imbalance of push", "push_imbalance", "{:.2f}".format)
    row("imbalance of pull", "pull_imbalance", "{:.2f}".format)
    row("devices equal bit for bit", "replicas_equal", yes_or_no.get)
    row("largest difference of a loss", "largest_loss_difference", "{:.1e}".format)
    row("  of a parameter", "largest_parameter_difference", "{:.1e}".format)
    row("seconds to compile", "compile_seconds", "{:.1f}".format)
    row("seconds a step (no network!)", "step_seconds", "{:.3f}".format)
    console.print(table)
    console.print(
        "Differences are those of rounding: sums are taken in another order. Simulated "
        "devices have no network: what they send is a copy in memory. The bytes are the "
        "result here, and the step time is not.",
        soft_wrap=True,
    )


def plot(runs: dict[str, Run], path: str) -> None:
    """Draws the losses over each other, and the bytes beside each other."""
    from matplotlib.figure import Figure  # Slow to import, and not always wanted.

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    colors = ["0.8", "tab:blue", "tab:orange"]
    for (name, run), color, width in zip(runs.items(), colors, (6, 3, 1), strict=True):
        steps = range(1, len(run.losses) + 1)
        left.plot(steps, run.losses, label=name, color=color, linewidth=width)
    left.set(xlabel="step", ylabel="loss", title="The same loss")
    left.legend(frameon=False)
    sent = [run.sent["sync/wire_bytes"] / 1e6 for run in runs.values()]
    bars = right.bar(list(runs), sent, color=colors)
    right.bar_label(bars, fmt="%.2f")
    right.set(ylabel="MB a step and rank", title="Fewer bytes")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
