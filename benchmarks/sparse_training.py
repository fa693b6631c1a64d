"""What sparsifiers do to training: accuracy and loss after the same steps, and step times.

    python -m benchmarks.sparse_training [digits] [text] [xml] [--steps 300]

`digits` is scikit-learn's set of handwritten digits and a network of two hidden layers,
`text` the demo's language model with SGD; both on four simulated devices, at a density of
1%, three seeds each, as DRAGONN's figures 4 and 7(a) compare. `xml` is DRAGONN's one layer
of 4,096 by 30,938 numbers (126.7 million) at full size on two simulated devices: the time
of a step, and what of it is the network's at 25 Gbit/s and 16 ranks by the paper's formula.

Writes benchmarks/results/sparse-training-*.jsonl and a plot of the losses.
"""

import argparse
import time

import jax
import numpy as np
import optax

import sparsejax
from benchmarks.record import RESULTS, Recorder, say
from benchmarks.training_tasks import (
    Task,
    chosen,
    draw_curves,
    mesh,
    mlp_digits,
    text as text_task,
    told,
    train,
)
from sparsejax.advise.papers import cost_tables


DENSITY = 0.01
WARM = 100  # steps over which the density falls from 25%, where there is a warm-up


def optimizers(rate: float, momentum: float) -> dict[str, optax.GradientTransformation]:
    """All with the same rate, and momentum unless they say so.

    DGC's momentum is before it is sparsified: masked, an element that went starts again
    without velocity, so what goes in every step has none.
    """
    behind = lambda sync: optax.chain(sync, optax.sgd(rate, momentum))
    own = {"min_size": 1000}
    sync = sparsejax.sync(sparsejax.schemes.AGSparse(code="auto"))
    small = {
        "dgc": sparsejax.dgc(DENSITY, **own),
        "dragonn": sparsejax.dragonn(DENSITY, **own),
        "top_k": sparsejax.top_k(DENSITY, **own),
        "random_k": sparsejax.random_k(DENSITY, **own),
    }
    warm = sparsejax.sparsifiers.Warmup(DENSITY, WARM)

    def corrected(density, masking=True):
        dgc = sparsejax.dgc(density, momentum=momentum, masking=masking, **own)
        return optax.chain(dgc, sync, optax.sgd(rate))

    return {
        "dense": behind(sparsejax.dense_sync()),
        "dense, no momentum": optax.chain(sparsejax.dense_sync(), optax.sgd(rate)),
        "dgc, its momentum": corrected(DENSITY),
        "dgc, its momentum, warm-up": corrected(warm),
        "dgc, its momentum, not masked": corrected(DENSITY, masking=False),
        "dragonn, warm-up": behind(optax.chain(sparsejax.dragonn(warm, **own), sync)),
        "top_k, warm-up": behind(optax.chain(sparsejax.top_k(warm, **own), sync)),
        **{name: behind(optax.chain(one, sync)) for name, one in small.items()},
    }


def compare(record: Recorder, part: str, task: Task, steps: int, only: list[str]) -> None:
    """All of them on one task."""
    for name, tx in chosen(optimizers(task.rate, 0.9), only).items():
        runs = train(task, tx, steps)
        scores = [run.score for run in runs]
        told(name, scores)
        own = {task.scored: scores, "losses": [run.losses for run in runs]}
        record.add(part=part, name=name, steps=steps, **own)


def digits(record: Recorder, steps: int, only: list[str]) -> None:
    """Test accuracy on handwritten digits."""
    say(f"\nDigits: test accuracy after {steps} steps, at {DENSITY:.0%} of the gradient")
    compare(record, "digits", mlp_digits(), steps, only)


def text(record: Recorder, steps: int, only: list[str]) -> None:
    """The loss of the demo's language model on text it has not seen."""
    say(f"\nText: loss on other text after {steps} steps, at {DENSITY:.0%} of the gradient")
    compare(record, "text", text_task(), steps, only)


def xml(record: Recorder, steps: int, only: list[str]) -> None:
    """The time of a step of one layer of 126.7 million numbers."""
    del steps
    inputs, outputs, batch = 4096, 30938, 32
    size = inputs * outputs
    rng = np.random.default_rng(0)
    data = {
        "x": rng.standard_normal((2 * batch, inputs)).astype(np.float32),
        "y": rng.integers(0, outputs, 2 * batch).astype(np.int32),
    }

    def loss(params, batch):
        scores = batch["x"] @ params["w"]
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean()

    sync = sparsejax.sync(sparsejax.schemes.AGSparse(code="auto"))
    sides = {
        "dense": sparsejax.dense_sync(),
        "dragonn": optax.chain(sparsejax.dragonn(0.001), sync),
        "dgc": optax.chain(sparsejax.dgc(0.001), sync),
        "top_k": optax.chain(sparsejax.top_k(0.001), sync),
    }
    say(f"\nOne layer of {inputs:,} x {outputs:,}, two devices, at 0.1%: seconds a step")
    for name, first in chosen(sides, only).items():
        tx = optax.chain(first, optax.sgd(0.1))
        trainer = sparsejax.data_parallel(loss, tx, mesh(2))
        state = trainer.init({"w": np.zeros((inputs, outputs), np.float32)})
        times, losses = [], []
        for _ in range(6):
            start = time.perf_counter()
            state, value = trainer.step(state, data)
            losses.append(float(value))
            times.append(time.perf_counter() - start)
        sent = float(sparsejax.metrics(state.opt_state)["sync/wire_bytes"])
        ratio = sent / (4 * size)  # two ranks: each sends its entries once
        formula = (
            cost_tables.dragonn_full(size, 4, 16)
            if name == "dense"
            else cost_tables.dragonn_sparse(size, 4, ratio, 16)
        )
        network = formula.time(20e-6, 25e9 / 8)
        middle = float(np.median(times[1:]))
        say(
            f"  {name:8} {middle:.2f} s here; {sent / 1e6:.2f} MB sent; for 16 ranks at 25 "
            f"Gbit/s {1e3 * network:.1f} ms on the network; loss {losses[-1]:.3f}"
        )
        record.add(
            part="xml",
            name=name,
            seconds=times[1:],
            sent=sent,
            network_seconds=network,
            losses=losses,
        )
        del state, trainer


def plot(record: Recorder, name: str) -> None:
    """The losses by step, of each part that has them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = [p for p in ("digits", "text") if any(r["part"] == p for r in record.rows)]
    if not parts:
        return
    figure, axes = plt.subplots(1, len(parts), figsize=(4.5 * len(parts), 3.5))
    for part, at in zip(parts, np.atleast_1d(axes), strict=True):
        rows = [row for row in record.rows if row["part"] == part]
        at.set_prop_cycle(color=plt.get_cmap("tab20").colors)
        for row in rows:
            draw_curves(at, row["losses"], row["name"])
        # What diverges leaves the picture.
        most = 2 * max(losses[0] for losses in rows[0]["losses"])
        at.set(xlabel="step", ylabel="training loss", title=part, yscale="log")
        at.set_ylim(top=most)
        at.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}-jax{jax.__version__}.png", dpi=120)


PARTS = {"digits": digits, "text": text, "xml": xml}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sparse_training", description=__doc__.splitlines()[0]
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all if none")
    parser.add_argument("--steps", type=int, default=300, help="of each run (300)")
    parser.add_argument("--only", nargs="+", default=[], help="of these; keep the others")
    args = parser.parse_args()
    parts = args.parts or list(PARTS)
    words = " ".join([*args.parts, "--steps", str(args.steps)])
    words += " --only " + " ".join(map(repr, args.only)) if args.only else ""
    record = Recorder(f"python -m benchmarks.sparse_training {words}")
    for part in parts:
        PARTS[part](record, args.steps, args.only)
    name = "sparse-training"
    again = lambda row: row["part"] in parts and (not args.only or row["name"] in args.only)
    record.keep(name, lambda row: not again(row))
    plot(record, name)
    say(f"written: {record.write(name)}")


if __name__ == "__main__":
    main()
