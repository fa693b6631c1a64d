"""Training with schemes that choose what they send, as their papers compare them.

    python -m benchmarks.papers.top_k.training [convergence] [selection] [density]

On four simulated devices, handwritten digits with a small VGG and the demo's language
model with 2,000 words; leaves of more than a thousand numbers are chosen from.

    convergence  accuracy, and loss on other text, after the same steps, three seeds, at 1%
    selection    Ok-Topk's figures 5 and 6: the numbers chosen, and xi of its assumption 1
    density      SparDL's figure 16: from a tenth to a hundred-thousandth of the gradient

`--optimizer` takes SGD with momentum (the default), the same behind so many dense steps,
the same with a rate that falls to zero (half a cosine) until the last step, or SGD without
momentum at four times the rate.

Writes benchmarks/results/choosing-training-*.jsonl and a plot for each part.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import optax

import sparsejax
from benchmarks.harness import settings
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.papers.top_k import plots
from benchmarks.papers.top_k.selection import watch
from benchmarks.training.tasks import SEEDS, Task, chosen, show, text, train, vgg_digits
from sparsejax import errors, schemes


NAME = "choosing-training"
DENSITY, WARMUP = 0.01, 20
DENSITIES = (1e-1, 1e-3, 1e-4, 1e-5)
POINTS = 200  # of a curve of losses, at least, where there are as many steps

TASKS: dict[str, Callable[[], Task]] = {
    "digits": vgg_digits,
    "text": lambda: text(2_000, 32),
}
# Leaves of more than a thousand numbers, all of them one group.
RULES = {
    "digits": {"(conv[123]|hidden|out)/kernel": "sparse"},
    "text": {"": "sparse"},
}
# The steps that are dense at first, and the optimizer for a rate and a number of steps.
OPTIMIZERS: dict[str, tuple[int, Callable]] = {
    "momentum": (0, lambda rate, steps: optax.sgd(rate, 0.9)),
    "warmup": (WARMUP, lambda rate, steps: optax.sgd(rate, 0.9)),
    "decay": (
        0,
        lambda rate, steps: optax.sgd(optax.cosine_decay_schedule(rate, steps), 0.9),
    ),
    "plain": (0, lambda rate, steps: optax.sgd(4 * rate)),
}


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Trains with schemes that choose what they send."""

    PROGRAM = "benchmarks.papers.top_k.training"
    parts: tuple[str, ...] = option(
        (),
        "all if none,",
        positional=True,
        choices=("convergence", "selection", "density"),
    )
    steps: int = option(200, "steps of each run")
    tasks: tuple[str, ...] = option(tuple(TASKS), choices=tuple(TASKS))
    optimizer: str = option("momentum", choices=tuple(OPTIMIZERS))
    only: tuple[str, ...] = option((), "sides to run; the file keeps the others' rows")
    densities: tuple[float, ...] = option((), "instead of those of the part")


def sides(density: float, **options: Any) -> dict[str, Any]:
    """All synchronizations that are compared; each leaf that is not dense goes by one."""
    spardl = lambda **teams: sparsejax.spardl_sync(density, **teams, **options)
    return {
        "dense": sparsejax.dense_sync(),
        "ok_topk": sparsejax.ok_topk_sync(density, **options),
        "spardl": spardl(),
        "spardl, R-SAG of 2": spardl(teams=2, between="swaps"),
        "spardl, B-SAG of 2": spardl(teams=2, between="gather"),
        "gtopk": sparsejax.transforms.gtopk_sync(density, **options),
        "topk_a": sparsejax.transforms.topk_a_sync(density, **options),
        "topk_dsa": sparsejax.transforms.topk_dsa_sync(density, **options),
        "gaussian_k": sparsejax.transforms.gaussian_k_sync(density, **options),
    }


def thinned(losses: list[float]) -> list[float]:
    """Means of so many steps each that no more than some hundreds are left."""
    every = max(1, len(losses) // POINTS)
    grouped = np.array(losses[: len(losses) // every * every]).reshape(-1, every)
    return [round(float(mean), 5) for mean in grouped.mean(1)]


def measured(task: Task, sync, settings: Settings, label: str, row: dict) -> dict:
    """Trains with one synchronization from all seeds, and completes its row."""
    warm, optimizer = OPTIMIZERS[settings.optimizer]
    sync = sparsejax.warm_up(sync, warm)
    tx = optax.chain(sync, optimizer(task.rate, settings.steps))
    runs = train(task, tx, settings.steps, SEEDS)
    scores = [run.score for run in runs]
    show(label, scores)
    sent = {key: runs[-1].metrics[f"sync/{key}"] for key in ("wire_bytes", "dense_bytes")}
    losses = [thinned(run.losses) for run in runs]
    return row | {task.scored: scores, "losses": losses, **sent}


def convergence(record: Recorder, task: Task, settings: Settings, about: dict) -> None:
    """Trains with all sides at one density."""
    syncs = sides(DENSITY, rules=RULES[about["task"]])
    for name, sync in chosen(syncs, settings.only).items():
        row = about | {"name": name, "density": DENSITY}
        record.add(**measured(task, sync, settings, name, row))
        record.write()


WATCHED_AT = (1e-2, 1e-3)
WATCHED = {
    "ok_topk": lambda density: schemes.OkTopk(density),
    "ok_topk, authors' rule": lambda density: schemes.OkTopk(density, power=None),
    "spardl": lambda density: schemes.SparDL(density),
}


def selection(record: Recorder, task: Task, settings: Settings, about: dict) -> None:
    """Counts the numbers chosen, and xi: one run each, from the first seed."""
    optimizer = OPTIMIZERS[settings.optimizer][1](task.rate, settings.steps)
    for density in settings.densities or WATCHED_AT:
        for name, scheme in chosen(WATCHED, settings.only).items():
            say(f"  {name}, {density:g}")
            row = about | {"name": name, "density": density}
            rules = RULES[about["task"]]
            counts = watch(task, scheme(density), rules, optimizer, settings.steps)
            record.add(**row, **counts)
            record.write()


def density(record: Recorder, task: Task, settings: Settings, about: dict) -> None:
    """Trains with SparDL and Ok-Topk at densities other than that of `convergence`."""
    for name in chosen(dict.fromkeys(("spardl", "ok_topk")), settings.only):
        for density in settings.densities or DENSITIES:
            row = about | {"name": name, "density": density}
            label = f"{name}, {density:g}"
            try:
                sync = sides(density, rules=RULES[about["task"]])[name]
                record.add(**measured(task, sync, settings, label, row))
            except errors.ArgumentError as error:
                say(f"  {label}: {error}")
                record.add(**row, error=str(error))
            record.write()


PARTS = {"convergence": convergence, "selection": selection, "density": density}


def main(argv: list[str] | None = None) -> None:
    settings = Settings.parse(argv)
    keys = ("part", "task", "name", "density", "optimizer", "steps")
    record = Recorder(NAME, settings.command(), keys)
    for part in settings.parts or PARTS:
        for kind in settings.tasks:
            task = TASKS[kind]()
            optimizer, steps = settings.optimizer, settings.steps
            say(f"\n{part}, {kind}: {task.scored} after {steps} steps ({optimizer})")
            about = dict(part=part, task=kind, optimizer=optimizer, steps=steps)
            PARTS[part](record, task, settings, about)
    for part in PARTS:
        plots.draw(part, record.all_rows(), NAME)
    say(f"written: {record.write()}")


if __name__ == "__main__":
    main()
