"""The figures of the language model's two runs, as a table and as a plot."""

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


def figures(dense: Run, zen: Run) -> dict[str, Any]:
    """The figures of both runs, and how far the runs are apart."""
    groups = {key.rsplit("/", 1)[0] for key in zen.sent if key.count("/") > 1}
    tables = max(groups, key=lambda group: zen.sent[f"{group}/dense_bytes"])
    pairs = [(dense.params[name], zen.params[name]) for name in dense.params]
    return {
        "dense": _figures(dense),
        "zen": _figures(zen)
        | {
            key: zen.sent[f"{tables}/{key}"]
            for key in (
                "density_before",
                "density_after",
                "push_imbalance",
                "pull_imbalance",
            )
        },
        "largest_loss_difference": float(
            np.max(np.abs(np.subtract(dense.losses, zen.losses)))
        ),
        "largest_parameter_difference": float(max(np.max(np.abs(a - b)) for a, b in pairs)),
        "parameters_bitwise_equal": all(a.tobytes() == b.tobytes() for a, b in pairs),
    }


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
    dense, zen = figures["dense"], figures["zen"]
    table = Table(title=f"{zen['steps']} steps, means over the steps")
    table.add_column("")
    table.add_column("dense", justify="right")
    table.add_column("zen", justify="right")

    def row(what, key, text):
        sides = (text(side[key]) if key in side else "" for side in (dense, zen))
        table.add_row(what, *sides)

    yes_or_no = {True: "yes", False: "NO"}
    row("loss of the last step", "final_loss", "{:.4f}".format)
    row("bytes each rank sends in a step", "wire_bytes", "{:,.0f}".format)
    row("  of which needed", "payload_bytes", "{:,.0f}".format)
    less = dense["wire_bytes"] / max(zen["wire_bytes"], 1)
    table.add_row("  times less than dense", "1.0", f"{less:.1f}")
    row("rows touched by the busiest rank", "density_before", "{:.2%}".format)
    row("rows touched by any rank", "density_after", "{:.2%}".format)
    row("imbalance of push", "push_imbalance", "{:.2f}".format)
    row("imbalance of pull", "pull_imbalance", "{:.2f}".format)
    row("devices equal bit for bit", "replicas_equal", yes_or_no.get)
    row("seconds to compile", "compile_seconds", "{:.1f}".format)
    row("seconds a step (no network!)", "step_seconds", "{:.3f}".format)
    console.print(table)
    loss, parameter = (figures[f"largest_{x}_difference"] for x in ("loss", "parameter"))
    console.print(f"Largest difference of a loss: {loss:.1e}.")
    if figures["parameters_bitwise_equal"]:
        console.print("The parameters of both runs are equal bit for bit.")
    else:
        console.print(
            f"Largest difference of a parameter: {parameter:.1e}, by rounding: sums are "
            "taken in another order.",
            soft_wrap=True,
        )
    console.print(
        "Simulated devices have no network: what they send is a copy in memory. The bytes "
        "are the result here, and the step time is not.",
        soft_wrap=True,
    )


def plot(dense: Run, zen: Run, path: str) -> None:
    """Draws the losses over each other, and the bytes beside each other."""
    from matplotlib.figure import Figure  # Slow to import, and not always wanted.

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    steps = range(1, len(dense.losses) + 1)
    left.plot(steps, dense.losses, label="dense", color="0.7", linewidth=5)
    left.plot(steps, zen.losses, label="zen", color="tab:blue", linewidth=1.2)
    left.set(xlabel="step", ylabel="loss", title="The same loss")
    left.legend(frameon=False)
    sent = [run.sent["sync/wire_bytes"] / 1e6 for run in (dense, zen)]
    bars = right.bar(["dense", "zen"], sent, color=["0.7", "tab:blue"])
    right.bar_label(bars, fmt="%.2f")
    right.set(ylabel="MB a step and rank", title="Fewer bytes")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
