"""The plots of `benchmarks.papers.top_k.training`, a file for each of its parts."""

import numpy as np

from benchmarks.harness import figure
from benchmarks.training.tasks import draw_curves


def draw(part: str, rows: list[dict], name: str) -> None:
    """Writes the plot of a part, if it has rows."""
    of_part = [row for row in rows if row["part"] == part]
    if not of_part:
        return
    if part == "density":
        key = lambda row: (row["task"], row["name"], row["optimizer"])
        runs = {key(row) for row in of_part}
        of_part += [r for r in rows if r["part"] == "convergence" and key(r) in runs]
        of_part.sort(key=lambda row: -row["density"])
    figure.save(f"{name}-{part}", figure=PLOTS[part](of_part))


def _values(rows: list[dict], key: str) -> list:
    return list(dict.fromkeys(row[key] for row in rows))


def _convergence(rows):
    """The losses by step: a panel for each task and optimizer."""
    tasks, optimizers = _values(rows, "task"), _values(rows, "optimizer")
    image, panels = figure.panels(len(optimizers), len(tasks))
    for line, optimizer in zip(panels, optimizers, strict=True):
        for axes, task in zip(line, tasks, strict=True):
            runs = [r for r in rows if (r["task"], r["optimizer"]) == (task, optimizer)]
            if not runs:
                axes.set_axis_off()
                continue
            for row in runs:
                every = row["steps"] // len(row["losses"][0])
                draw_curves(axes, row["losses"], row["name"], every)
            axes.set(xlabel="step", ylabel="training loss", title=f"{task}, {optimizer}")
            axes.set_yscale("log")
            axes.legend(fontsize=6)
    return image


def _selection(rows):
    """The numbers chosen over k, and below them xi, by step: a column for each task."""
    tasks = _values(rows, "task")
    image, panels = figure.panels(3, len(tasks))
    for column, task in zip(panels.T, tasks, strict=True):
        of_task = [row for row in rows if row["task"] == task]
        density = of_task[0]["density"]
        column[0].axhline(1, color="black", linewidth=0.5, label="exact top-k")
        for row in of_task:
            by_step, label = row["by_step"], f"{row['name']}, {row['density']:g}"
            if row["density"] == density:
                for axes, count in zip(column, ("local", "total"), strict=False):
                    if count in by_step:
                        axes.plot(by_step[count], label=row["name"], linewidth=0.8)
                if row is of_task[0]:
                    for count in ("gaussian", "gaussian, moved"):
                        column[0].plot(by_step[count], label=count, linewidth=0.8)
            column[2].plot(by_step["xi"], label=label, linewidth=0.8)
        column[1].axhline(1, color="black", linewidth=0.5, label="exact top-k")
        labels = ("chosen locally", "chosen of the sum")
        for axes, label in zip(column, labels, strict=False):
            axes.set(xlabel="step", ylabel=f"{label} / k", title=f"{task}, {density:g}")
        column[0].set(yscale="log", ylim=(0.1, 10))
        column[2].set(xlabel="step", ylabel="xi", title=f"{task}: assumption 1")
        for axes in column:
            axes.legend(fontsize=6)
    return image


def _density(rows):
    """The result against the density, and the losses by step: a row for each task."""
    tasks = _values(rows, "task")
    image, panels = figure.panels(len(tasks), 3)
    for line, task in zip(panels, tasks, strict=True):
        trained = [row for row in rows if row["task"] == task and "losses" in row]
        for name in sorted(_values(trained, "name")):
            of_name = [row for row in trained if row["name"] == name]
            key = "accuracy" if "accuracy" in of_name[0] else "loss"
            scores = np.array([row[key] for row in of_name])
            densities = [row["density"] for row in of_name]
            line[0].errorbar(
                densities, scores.mean(1), scores.std(1), label=name, capsize=2
            )
            line[0].set(ylabel=key)
            sent = [row["wire_bytes"] for row in of_name]
            line[1].plot(densities, sent, "o-", label=name)
        line[0].set(xscale="log", xlabel="density", title=task)
        line[1].set(xscale="log", yscale="log", xlabel="density", ylabel="bytes a step")
        for row in (row for row in trained if row["name"] == trained[0]["name"]):
            draw_curves(line[2], row["losses"], f"{row['name']}, {row['density']:g}")
        line[2].set(xlabel="step", ylabel="training loss", yscale="log")
        for axes in line:
            axes.legend(fontsize=6)
    return image


PLOTS = {"convergence": _convergence, "selection": _selection, "density": _density}
