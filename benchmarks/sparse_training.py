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
import itertools
import math
import time

import jax


jax.config.update("jax_num_cpu_devices", 4)

import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

import sparsejax  # noqa: E402
from benchmarks.record import RESULTS, Recorder, say  # noqa: E402
from sparsejax import cost_tables  # noqa: E402


RANKS, DENSITY, SEEDS = 4, 0.01, (0, 1, 2)
WINDOW = 10  # steps over which the curves are smoothed


def mesh(ranks: int = RANKS) -> Mesh:
    return Mesh(np.array(jax.devices()[:ranks]), ("data",), axis_types=(AxisType.Auto,))


def optimizers(rate: float, momentum: float) -> dict[str, optax.GradientTransformation]:
    """All with the same rate and momentum; DGC's momentum is before it is sparsified."""
    behind = lambda sync: optax.chain(sync, optax.sgd(rate, momentum))
    own = {"min_size": 1000}
    sync = sparsejax.sync(sparsejax.schemes.AGSparse(code="auto"))
    small = {
        "dgc": sparsejax.dgc(DENSITY, **own),
        "dragonn": sparsejax.dragonn(DENSITY, **own),
        "top_k": sparsejax.top_k(DENSITY, **own),
        "random_k": sparsejax.random_k(DENSITY, **own),
    }
    corrected = sparsejax.dgc(DENSITY, momentum=momentum, **own)
    return {
        "dense": behind(sparsejax.dense_sync()),
        "dgc, its momentum": optax.chain(corrected, sync, optax.sgd(rate)),
        **{name: behind(optax.chain(one, sync)) for name, one in small.items()},
    }


def chosen(sides: dict, only: list[str]) -> dict:
    """Those that were asked for; all if none."""
    return {name: side for name, side in sides.items() if not only or name in only}


def train(loss_fn, tx, params, batches) -> tuple[list[float], dict]:
    """The losses by step, and the parameters at the end."""
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh())
    state = trainer.init(params)
    losses = []
    for batch in batches:
        state, loss = trainer.step(state, batch)
        losses.append(float(loss))
    return losses, jax.device_get(state.params)


def digits(record: Recorder, steps: int, only: list[str]) -> None:
    """Test accuracy on handwritten digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = (data.data / 16).astype(np.float32), data.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order], y[order]
    train_x, train_y, test_x, test_y = x[:1400], y[:1400], x[1400:], y[1400:]

    def init(seed):
        rng = np.random.default_rng(seed)
        sizes = (64, 256, 256, 10)
        layers = itertools.pairwise(sizes)
        return {
            f"layer{i}": (rng.standard_normal((a, b)) * math.sqrt(2 / a)).astype(np.float32)
            for i, (a, b) in enumerate(layers)
        }

    def logits(params, x):
        x = jax.nn.relu(x @ params["layer0"])
        x = jax.nn.relu(x @ params["layer1"])
        return x @ params["layer2"]

    def loss(params, batch):
        scores = logits(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean()

    def batches(seed):
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            chosen = rng.integers(0, len(train_y), 128)
            yield {"x": train_x[chosen], "y": train_y[chosen]}

    say(f"\nDigits: test accuracy after {steps} steps, at {DENSITY:.0%} of the gradient")
    for name, tx in chosen(optimizers(0.05, 0.9), only).items():
        found, curves = [], []
        for seed in SEEDS:
            losses, params = train(loss, tx, init(seed), batches(seed))
            guess = np.argmax(np.asarray(logits(params, test_x)), axis=1)
            found.append(float((guess == test_y).mean()))
            curves.append(losses)
        told = ", ".join(f"{one:.4f}" for one in found)
        spread = np.std(found)
        say(f"  {name:20} {np.mean(found):.4f} +- {spread:.4f}  ({told})")
        record.add(part="digits", name=name, steps=steps, accuracy=found, losses=curves)


def text(record: Recorder, steps: int, only: list[str]) -> None:
    """The loss of the demo's language model on text it has not seen."""
    from examples import lm_corpus, lm_model

    corpus = lm_corpus.load()
    words, width = len(corpus.words), 64
    cut = len(corpus.tokens) * 9 // 10
    held_out = lm_model.batches(corpus.tokens[cut:], words, RANKS, seed=99)
    held_out = list(itertools.islice(held_out, 20))
    first_rank = lambda batch: {k: v[: len(v) // RANKS] for k, v in batch.items()}
    evaluate = jax.jit(lm_model.loss_fn)

    say(f"\nText: loss on other text after {steps} steps, at {DENSITY:.0%} of the gradient")
    for name, tx in chosen(optimizers(1.0, 0.9), only).items():
        found, curves = [], []
        for seed in SEEDS:
            batches = lm_model.batches(corpus.tokens[:cut], words, RANKS, seed=seed)
            params = lm_model.init(words, width, seed)
            losses, params = train(
                lm_model.loss_fn, tx, params, itertools.islice(batches, steps)
            )
            unseen = [float(evaluate(params, first_rank(batch))) for batch in held_out]
            found.append(float(np.mean(unseen)))
            curves.append(losses)
        told = ", ".join(f"{one:.4f}" for one in found)
        say(f"  {name:20} {np.mean(found):.4f} +- {np.std(found):.4f}  ({told})")
        record.add(part="text", name=name, steps=steps, loss=found, losses=curves)


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
    """The losses by step: a line the mean of the seeds, a band from least to most."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = [p for p in ("digits", "text") if any(r["part"] == p for r in record.rows)]
    if not parts:
        return
    figure, axes = plt.subplots(1, len(parts), figsize=(4.5 * len(parts), 3.5))
    for part, at in zip(parts, np.atleast_1d(axes), strict=True):
        for row in (r for r in record.rows if r["part"] == part):
            losses = np.array(row["losses"])
            sums = np.cumsum(losses, axis=1)
            smooth = (sums[:, WINDOW:] - sums[:, :-WINDOW]) / WINDOW
            steps = np.arange(WINDOW, losses.shape[1])
            at.plot(steps, smooth.mean(0), label=row["name"], linewidth=1)
            at.fill_between(steps, smooth.min(0), smooth.max(0), alpha=0.15)
        at.set(xlabel="step", ylabel="training loss", title=part)
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
    words += "".join(f" --only {name!r}" for name in args.only)
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
