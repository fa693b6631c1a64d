"""The plots of `choosing_training`, a file for each of its parts."""

import jax
import numpy as np

from benchmarks.record import RESULTS
from benchmarks.training_tasks import draw_curves


def draw(part: str, rows: list[dict], name: str) -> None:
    """Writes the plot of a part, if it has rows."""
    own = [row for row in rows if row["part"] == part]
    if not own:
        return
    if part == "density":
        key = lambda row: (row["task"], row["name"], row["optimizer"])
        known = {key(row) for row in own}
        own += [r for r in rows if r["part"] == "convergence" and key(r) in known]
        own.sort(key=lambda row: -row["density"])
    import matplotlib

    matplotlib.use("Agg")
    figure = PLOTS[part](own)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}-{part}-jax{jax.__version__}.png", dpi=120)


def _grid(down: int, across: int):
    import matplotlib.pyplot as plt

    return plt.subplots(down, across, figsize=(4.5 * across, 3.5 * down), squeeze=False)


def _values(rows: list[dict], key: str) -> list:
    return list(dict.fromkeys(row[key] for row in rows))


def _convergence(rows):
    """The losses by step: a panel for each task and optimizer."""
    tasks, optimizers = _values(rows, "task"), _values(rows, "optimizer")
    figure, axes = _grid(len(optimizers), len(tasks))
    for line, optimizer in zip(axes, optimizers, strict=True):
        for at, task in zip(line, tasks, strict=True):
            found = [r for r in rows if (r["task"], r["optimizer"]) == (task, optimizer)]
            if not found:
                at.set_axis_off()
                continue
            for row in found:
                every = row["steps"] // len(row["losses"][0])
                draw_curves(at, row["losses"], row["name"], every)
            at.set(xlabel="step", ylabel="training loss", title=f"{task}, {optimizer}")
            at.set_yscale("log")
            at.legend(fontsize=6)
    return figure


def _selection(rows):
    """How many are chosen over k, and below it xi, by step: a column for each task."""
    tasks = _values(rows, "task")
    figure, axes = _grid(3, len(tasks))
    for column, task in zip(axes.T, tasks, strict=True):
        of_task = [row for row in rows if row["task"] == task]
        first = of_task[0]["density"]
        column[0].axhline(1, color="black", linewidth=0.5, label="exact top-k")
        for row in of_task:
            seen, label = row["by_step"], f"{row['name']}, {row['density']:g}"
            if row["density"] == first:
                for at, what in zip(column, ("local", "total"), strict=False):
                    if what in seen:
                        at.plot(seen[what], label=row["name"], linewidth=0.8)
                if row is of_task[0]:
                    for what in ("gaussian", "gaussian, moved"):
                        column[0].plot(seen[what], label=what, linewidth=0.8)
            column[2].plot(seen["xi"], label=label, linewidth=0.8)
        column[1].axhline(1, color="black", linewidth=0.5, label="exact top-k")
        for at, what in zip(column, ("chosen locally", "chosen of the sum"), strict=False):
            at.set(xlabel="step", ylabel=f"{what} / k", title=f"{task}, {first:g}")
        column[0].set(yscale="log", ylim=(0.1, 10))
        column[2].set(xlabel="step", ylabel="xi", title=f"{task}: assumption 1")
        for at in column:
            at.legend(fontsize=6)
    return figure


def _density(rows):
    """The result against the density, and the losses by step: a row for each task."""
    tasks = _values(rows, "task")
    figure, axes = _grid(len(tasks), 3)
    for line, task in zip(axes, tasks, strict=True):
        own = [row for row in rows if row["task"] == task and "losses" in row]
        for name in sorted(_values(own, "name")):
            of_name = [row for row in own if row["name"] == name]
            key = "accuracy" if "accuracy" in of_name[0] else "loss"
            found = np.array([row[key] for row in of_name])
            at = [row["density"] for row in of_name]
            line[0].errorbar(at, found.mean(1), found.std(1), label=name, capsize=2)
            line[0].set(ylabel=key)
            line[1].plot(at, [row["wire_bytes"] for row in of_name], "o-", label=name)
        line[0].set(xscale="log", xlabel="density", title=task)
        line[1].set(xscale="log", yscale="log", xlabel="density", ylabel="bytes a step")
        for row in (row for row in own if row["name"] == own[0]["name"]):
            draw_curves(line[2], row["losses"], f"{row['name']}, {row['density']:g}")
        line[2].set(xlabel="step", ylabel="training loss", yscale="log")
        for at in line:
            at.legend(fontsize=6)
    return figure


PLOTS = {"convergence": _convergence, "selection": _selection, "density": _density}
