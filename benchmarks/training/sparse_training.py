"""Training with sparsifiers: accuracy and loss after the same steps, and step times.

    python -m benchmarks.training.sparse_training [digits] [text] [xml] [--steps 300]

`digits` is scikit-learn's set of handwritten digits and a network of two hidden layers,
`text` the demo's language model with SGD; both on four simulated devices, at a density of
1%, three seeds each, as DRAGONN's figures 4 and 7(a) compare. `xml` is DRAGONN's one layer
of 4,096 by 30,938 numbers (126.7 million) at full size on two simulated devices: the time
of a step, and the network's share of it at 25 Gbit/s and 16 ranks by the paper's formula.

Writes benchmarks/results/sparse-training-*.jsonl and a plot of the losses.
"""

import dataclasses
import time

import matplotlib
import numpy as np
import optax

import sparsejax
from benchmarks.harness import figure, settings
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.papers.formulas import cost_tables
from benchmarks.training.tasks import (
    Task,
    chosen,
    draw_curves,
    mesh,
    mlp_digits,
    show,
    text as text_task,
    train,
)


NAME = "sparse-training"
DENSITY = 0.01
WARM = 100  # steps over which the density falls from 25%, where there is a warm-up


def optimizers(rate: float, momentum: float) -> dict[str, optax.GradientTransformation]:
    """Optimizers with the same rate, and momentum unless their names say otherwise.

    DGC's momentum is before it is sparsified: masked, an element that was sent starts again
    without velocity, so one that is sent in every step has none.
    """
    behind = lambda sync: optax.chain(sync, optax.sgd(rate, momentum))
    gate = {"min_size": 1000}
    sync = sparsejax.sync(sparsejax.schemes.AGSparse(code="auto"))
    small = {
        "dgc": sparsejax.dgc(DENSITY, **gate),
        "dragonn": sparsejax.sparsify(sparsejax.sparsifiers.Dragonn(DENSITY), **gate),
        "top_k": sparsejax.top_k(DENSITY, **gate),
        "random_k": sparsejax.sparsify(sparsejax.sparsifiers.RandomK(DENSITY), **gate),
    }
    warm = sparsejax.sparsifiers.Warmup(DENSITY, WARM)

    def corrected(density, masking=True):
        memory = sparsejax.MomentumCorrection(momentum, masking=masking)
        dgc = sparsejax.dgc(density, memory=memory, **gate)
        return optax.chain(dgc, sync, optax.sgd(rate))

    return {
        "dense": behind(sparsejax.dense_sync()),
        "dense, no momentum": optax.chain(sparsejax.dense_sync(), optax.sgd(rate)),
        "dgc, its momentum": corrected(DENSITY),
        "dgc, its momentum, warm-up": corrected(warm),
        "dgc, its momentum, not masked": corrected(DENSITY, masking=False),
        "dragonn, warm-up": behind(
            optax.chain(
                sparsejax.sparsify(sparsejax.sparsifiers.Dragonn(warm), **gate), sync
            )
        ),
        "top_k, warm-up": behind(optax.chain(sparsejax.top_k(warm, **gate), sync)),
        **{name: behind(optax.chain(tx, sync)) for name, tx in small.items()},
    }


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Trains with sparsifiers."""

    PROGRAM = "benchmarks.training.sparse_training"
    parts: tuple[str, ...] = option(
        (), "all if none,", positional=True, choices=("digits", "text", "xml")
    )
    steps: int = option(300, "steps of each run")
    only: tuple[str, ...] = option((), "sides to run; the file keeps the others' rows")


def compare(record: Recorder, part: str, task: Task, settings: Settings) -> None:
    """Trains with all sparsifiers on one task."""
    steps = settings.steps
    say(f"\n{part}: {task.scored} after {steps} steps, at {DENSITY:.0%} of the gradient")
    for name, tx in chosen(optimizers(task.rate, 0.9), settings.only).items():
        runs = train(task, tx, steps)
        scores = [run.score for run in runs]
        show(name, scores)
        row = {task.scored: scores, "losses": [run.losses for run in runs]}
        record.add(part=part, name=name, steps=steps, **row)


def digits(record: Recorder, settings: Settings) -> None:
    """Test accuracy on handwritten digits."""
    compare(record, "digits", mlp_digits(), settings)


def text(record: Recorder, settings: Settings) -> None:
    """The loss of the demo's language model on text that it was not trained on."""
    compare(record, "text", text_task(), settings)


def xml(record: Recorder, settings: Settings) -> None:
    """The time of a step of one layer of 126.7 million numbers."""
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
        "dragonn": optax.chain(
            sparsejax.sparsify(sparsejax.sparsifiers.Dragonn(0.001)), sync
        ),
        "dgc": optax.chain(sparsejax.dgc(0.001), sync),
        "top_k": optax.chain(sparsejax.top_k(0.001), sync),
    }
    say(f"\nOne layer of {inputs:,} x {outputs:,}, two devices, at 0.1%: seconds a step")
    for name, sync in chosen(sides, settings.only).items():
        tx = optax.chain(sync, optax.sgd(0.1))
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


def plot(rows: list[dict]) -> None:
    """Draws the losses by step, of each part that has them."""
    parts = [p for p in ("digits", "text") if any(row["part"] == p for row in rows)]
    if not parts:
        return
    image, (panels,) = figure.panels(1, len(parts))
    for part, axes in zip(parts, panels, strict=True):
        of_part = [row for row in rows if row["part"] == part]
        axes.set_prop_cycle(color=matplotlib.colormaps["tab20"].colors)
        for row in of_part:
            draw_curves(axes, row["losses"], row["name"])
        # Losses that diverge leave the picture.
        most = 2 * max(losses[0] for losses in of_part[0]["losses"])
        axes.set(xlabel="step", ylabel="training loss", title=part, yscale="log")
        axes.set_ylim(top=most)
        axes.legend(fontsize=7)
    figure.save(NAME, figure=image)


PARTS = {"digits": digits, "text": text, "xml": xml}


def main(argv: list[str] | None = None) -> None:
    settings = Settings.parse(argv)
    record = Recorder(NAME, settings.command(), ("part", "name"))
    for part in settings.parts or PARTS:
        PARTS[part](record, settings)
    plot(record.all_rows())
    say(f"written: {record.write()}")


if __name__ == "__main__":
    main()
