"""The figures of an example's runs, as a table and as a plot."""

import json
import math
import statistics
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table


SCORES = {"accuracy": "accuracy", "held_out_loss": "loss of what was not trained on"}


class Run(NamedTuple):
    """The results of one run.

    Attributes:
        losses: Of each step.
        sent: The metrics of `sparsejax.metrics`, averaged over the steps.
        params: The parameters at the end, as NumPy arrays; None for a leaf that is spread
            over several hosts.
        replicas_equal: Whether all devices ended with the same bytes.
        compile_seconds: The time of the first step beyond that of the median one.
        step_seconds: The median step of those after the first; None, as is
            `compile_seconds`, where these are fewer than two.
        scores: Figures of the parameters at the end, such as an accuracy.
    """

    losses: list[float]
    sent: dict[str, float]
    params: Any
    replicas_equal: bool
    compile_seconds: float | None
    step_seconds: float | None
    scores: dict[str, float]


def seconds(steps: list[float]) -> tuple[float | None, float | None]:
    """The seconds that compiling took, and those of a step, from those of all steps.

    The first step compiles. A single further step is no measure.
    """
    if len(steps) < 3:
        return None, None
    step = statistics.median(steps[1:])
    return steps[0] - step, step


def as_json(figures: Any) -> str:
    """The figures as JSON, which has no NaN and no infinity: null for these."""

    def told(x):
        if isinstance(x, dict):
            return {key: told(value) for key, value in x.items()}
        if isinstance(x, (list, tuple)):
            return [told(value) for value in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(told(figures), allow_nan=False)


def numbers(x: jax.Array) -> np.ndarray | None:
    """The numbers of an array, where this host has all of them."""
    return np.asarray(x) if x.is_fully_addressable or x.is_fully_replicated else None


def figures(runs: dict[str, Run]) -> dict[str, Any]:
    """The figures of all runs, and the difference of the others from the first one."""
    names = iter(runs)
    first = runs[next(names)]
    found: dict[str, Any] = {name: _figures(run) for name, run in runs.items()}
    for name in names:
        run = runs[name]
        leaves = jax.tree.leaves(first.params), jax.tree.leaves(run.params)
        pairs = list(zip(*leaves, strict=True))
        # A run that went on from an earlier checkpoint has more of them.
        both = min(len(first.losses), len(run.losses))
        losses = np.abs(np.subtract(first.losses[-both:], run.losses[-both:]))
        found[name] |= {
            "largest_loss_difference": float(np.max(losses)),
            "largest_parameter_difference": float(
                max(np.max(np.abs(a - b)) for a, b in pairs)
            ),
            "parameters_bitwise_equal": all(a.tobytes() == b.tobytes() for a, b in pairs),
        }
    return found


def _figures(run: Run) -> dict[str, Any]:
    # Of the bucket that a dense sum would send the most of: that of the tables.
    groups = {key.rsplit("/", 1)[0] for key in run.sent if key.count("/") > 1}
    largest = max(groups, key=lambda group: run.sent[f"{group}/dense_bytes"])
    details = ("density_before", "density_after", "push_imbalance", "pull_imbalance")
    if run.sent["sync/wire_bytes"] >= run.sent["sync/dense_bytes"]:
        details = ()  # A dense sum does not look at rows.
    return {
        "steps": len(run.losses),
        "final_loss": run.losses[-1],
        **run.scores,
        "wire_bytes": run.sent["sync/wire_bytes"],
        "payload_bytes": run.sent["sync/payload_bytes"],
        "dense_bytes": run.sent["sync/dense_bytes"],
        **{key: run.sent[f"{largest}/{key}"] for key in details},
        "replicas_equal": run.replicas_equal,
        "compile_seconds": run.compile_seconds,
        "step_seconds": run.step_seconds,
        "steps_a_second": run.step_seconds and 1 / run.step_seconds,
    }


def show(console: Console, figures: dict[str, Any], simulated: bool) -> None:
    """Prints a table, and how to read it.

    Args:
        console: Where.
        figures: From `figures`.
        simulated: Whether devices are, which have no network.
    """
    first = next(iter(figures.values()))
    table = Table(title=f"{first['steps']} steps, means over the steps")
    table.add_column("")
    for name in figures:
        table.add_column(name, justify="right")

    def row(what, key, text):
        if not any(key in side for side in figures.values()):
            return
        told = (side.get(key) for side in figures.values())
        table.add_row(what, *("" if value is None else text(value) for value in told))

    yes_or_no = {True: "yes", False: "NO"}
    row("loss of the last step", "final_loss", "{:.4f}".format)
    for key, what in SCORES.items():
        row(what, key, "{:.4f}".format)
    row("bytes each rank sends in a step", "wire_bytes", "{:,.0f}".format)
    row("  of which needed", "payload_bytes", "{:,.0f}".format)
    less = (side["dense_bytes"] / max(side["wire_bytes"], 1) for side in figures.values())
    table.add_row("  times less than dense", *map("{:.1f}".format, less))
    row("not zero on the busiest rank", "density_before", "{:.2%}".format)
    row("not zero on any rank", "density_after", "{:.2%}".format)
    row("imbalance of push", "push_imbalance", "{:.2f}".format)
    row("imbalance of pull", "pull_imbalance", "{:.2f}".format)
    row("devices equal bit for bit", "replicas_equal", yes_or_no.get)
    row("largest difference of a loss", "largest_loss_difference", "{:.1e}".format)
    row("  of a parameter", "largest_parameter_difference", "{:.1e}".format)
    row("seconds to compile", "compile_seconds", "{:.1f}".format)
    speed = "steps a second (no network!)" if simulated else "steps a second"
    row(speed, "steps_a_second", "{:.2f}".format)
    console.print(table)
    if simulated:
        console.print(
            "Differences are those of rounding, where nothing is left out: sums are taken "
            "in another order. Simulated devices have no network: what they send is a copy "
            "in memory. The bytes are the result here, and the time of a step is not.",
            soft_wrap=True,
        )


def plot(runs: dict[str, Run], path: str) -> None:
    """Draws the losses in one plot, and the bytes in another."""
    from matplotlib.figure import Figure  # Slow to import, and not always wanted.

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    colors = ["0.8", "tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple"]
    colors = colors[: len(runs)]
    for at, (name, run) in enumerate(runs.items()):
        steps = range(1, len(run.losses) + 1)
        width = max(1, 6 - 2.5 * at)
        left.plot(steps, run.losses, label=name, color=colors[at], linewidth=width)
    left.set(xlabel="step", ylabel="loss", title="Loss")
    left.legend(frameon=False)
    sent = [run.sent["sync/wire_bytes"] / 1e6 for run in runs.values()]
    bars = right.bar(list(runs), sent, color=colors)
    right.bar_label(bars, fmt="%.2f")
    right.set(ylabel="MB a step and rank", title="Bytes sent")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
