"""What schemes that choose what they send do to training, as their papers compare them.

    python -m benchmarks.choosing_training [convergence] [selection] [density] [--steps 200]

On four simulated devices, handwritten digits with a small VGG and the demo's language
model with 2,000 words; leaves of more than a thousand numbers are chosen from.

    convergence  accuracy, and loss on other text, after the same steps, three seeds, at 1%
    selection    Ok-Topk's figures 5 and 6: how many are chosen, and xi of its assumption 1
    density      SparDL's figure 16: from a tenth to a hundred-thousandth of the gradient

`--optimizer` takes SGD with momentum (the default), the same behind so many dense steps,
the same with a rate that falls to zero (half a cosine) until the last step, or SGD without
momentum at four times the rate.

Writes benchmarks/results/choosing-training-*.jsonl and a plot for each part.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import optax

import sparsejax
from benchmarks import choosing_plots
from benchmarks.choosing_selection import watch
from benchmarks.record import Recorder, say
from benchmarks.training_tasks import SEEDS, Task, chosen, text, told, train, vgg_digits
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
# What the synchronization is told, and the optimizer for a rate and so many steps.
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable]] = {
    "momentum": ({}, lambda rate, steps: optax.sgd(rate, 0.9)),
    "warmup": ({"warmup_steps": WARMUP}, lambda rate, steps: optax.sgd(rate, 0.9)),
    "decay": (
        {},
        lambda rate, steps: optax.sgd(optax.cosine_decay_schedule(rate, steps), 0.9),
    ),
    "plain": ({}, lambda rate, steps: optax.sgd(4 * rate)),
}


def sides(density: float, **options: Any) -> dict[str, Any]:
    """All that are compared; each leaf that is not dense goes by the scheme."""
    spardl = lambda **own: sparsejax.spardl_sync(density, **own, **options)
    return {
        "dense": sparsejax.dense_sync(),
        "ok_topk": sparsejax.ok_topk_sync(density, **options),
        "spardl": spardl(),
        "spardl, R-SAG of 2": spardl(teams=2, between="swaps"),
        "spardl, B-SAG of 2": spardl(teams=2, between="gather"),
        "gtopk": sparsejax.gtopk_sync(density, **options),
        "topk_a": sparsejax.topk_a_sync(density, **options),
        "topk_dsa": sparsejax.topk_dsa_sync(density, **options),
        "gaussian_k": sparsejax.gaussian_k_sync(density, **options),
    }


def thinned(losses: list[float]) -> list[float]:
    """Means of so many steps each that no more than some hundreds are left."""
    every = max(1, len(losses) // POINTS)
    whole = np.array(losses[: len(losses) // every * every]).reshape(-1, every)
    return [round(float(mean), 5) for mean in whole.mean(1)]


def measure(part: str, name: str, own: Task, sync, density: float, args, **row) -> dict:
    """Trains with one synchronization from all seeds: a row."""
    tx = optax.chain(sync, OPTIMIZERS[args.optimizer][1](own.rate, args.steps))
    runs = train(own, tx, args.steps, SEEDS)
    scores = [run.score for run in runs]
    told(f"{name}, {density:g}" if part == "density" else name, scores)
    sent = {key: runs[-1].metrics[f"sync/{key}"] for key in ("wire_bytes", "dense_bytes")}
    return dict(
        part=part,
        name=name,
        density=density,
        optimizer=args.optimizer,
        steps=args.steps,
        **{own.scored: scores},
        losses=[thinned(run.losses) for run in runs],
        **sent,
        **row,
    )


def convergence(record: Recorder, args) -> None:
    """All sides at one density."""
    for kind in args.tasks:
        task = TASKS[kind]()
        say(f"\n{kind}: {task.scored} after {args.steps} steps ({args.optimizer}), at 1%")
        options = {"rules": RULES[kind], **OPTIMIZERS[args.optimizer][0]}
        for name, sync in chosen(sides(DENSITY, **options), args.only).items():
            record.add(**measure("convergence", name, task, sync, DENSITY, args, task=kind))
            record.write(NAME)


WATCHED_AT = (1e-2, 1e-3)
WATCHED = {
    "ok_topk": lambda density: schemes.OkTopk(density),
    "ok_topk, authors' rule": lambda density: schemes.OkTopk(density, power=None),
    "spardl": lambda density: schemes.SparDL(density),
}


def selection(record: Recorder, args) -> None:
    """How many are chosen, and xi: one run each, from the first seed."""
    for kind in args.tasks:
        task = TASKS[kind]()
        optimizer = OPTIMIZERS[args.optimizer][1](task.rate, args.steps)
        say(f"\n{kind}: what is chosen in {args.steps} steps ({args.optimizer})")
        for share in args.densities or WATCHED_AT:
            for name, make in chosen(WATCHED, args.only).items():
                say(f"  {name}, {share:g}")
                seen = watch(task, make(share), RULES[kind], optimizer, args.steps)
                own = dict(task=kind, name=name, density=share, steps=args.steps)
                record.add(part="selection", optimizer=args.optimizer, **own, **seen)
                record.write(NAME)


def density(record: Recorder, args) -> None:
    """SparDL and Ok-Topk at several densities; 1% and dense are in `convergence`."""
    for kind in args.tasks:
        task = TASKS[kind]()
        say(f"\n{kind}: {task.scored} after {args.steps} steps ({args.optimizer})")
        for name in ("spardl", "ok_topk"):
            if args.only and name not in args.only:
                continue
            for share in args.densities or DENSITIES:
                options = {"rules": RULES[kind], **OPTIMIZERS[args.optimizer][0]}
                try:
                    sync = sides(share, **options)[name]
                    row = measure("density", name, task, sync, share, args, task=kind)
                except errors.ArgumentError as error:
                    say(f"  {name}, {share:g}: {error}")
                    row = dict(part="density", task=kind, name=name, density=share)
                    row |= dict(optimizer=args.optimizer, error=str(error))
                record.add(**row)
                record.write(NAME)


PARTS = {"convergence": convergence, "selection": selection, "density": density}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.choosing_training", description=__doc__.splitlines()[0]
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all if none")
    parser.add_argument("--steps", type=int, default=200, help="of each run (200)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="momentum")
    parser.add_argument("--only", nargs="+", default=[], help="of these; keep the others")
    parser.add_argument("--densities", nargs="+", type=float, default=[])
    args = parser.parse_args()
    parts = args.parts or list(PARTS)
    words = " ".join([*args.parts, "--steps", str(args.steps), "--tasks", *args.tasks])
    words += f" --optimizer {args.optimizer}"
    for name, given in (("only", args.only), ("densities", args.densities)):
        words += f" --{name} " + " ".join(map(repr, given)) if given else ""
    record = Recorder(f"python -m benchmarks.choosing_training {words}")

    def again(row):
        if row["part"] not in parts or row["task"] not in args.tasks:
            return False
        if row["part"] != "convergence" and row["density"] not in (
            args.densities or [row["density"]]
        ):
            return False
        same = row["optimizer"] == args.optimizer
        same = same and row.get("steps", args.steps) == args.steps
        return same and (not args.only or row["name"] in args.only)

    record.keep(NAME, lambda row: not again(row))
    for part in parts:
        PARTS[part](record, args)
    for part in PARTS:
        choosing_plots.draw(part, record.rows, NAME)
    say(f"written: {record.write(NAME)}")


if __name__ == "__main__":
    main()
