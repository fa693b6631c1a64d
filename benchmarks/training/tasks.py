"""Small training runs on four simulated devices: models, batches, and the loop.

    mlp_digits, vgg_digits   scikit-learn's handwritten digits: two hidden layers, or four
                             convolutions and a hidden layer
    text                     the demo's language model

A task has parameters to start from, batches to train on, and a score on data that was not
trained on. Importing this makes four devices of the processor.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax


jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

import sparsejax  # noqa: E402
from benchmarks.harness.record import say  # noqa: E402


RANKS, SEEDS = 4, (0, 1, 2)
WINDOW = 10  # points over which the curves are smoothed


class Task(NamedTuple):
    """A model, its data and its score.

    Attributes:
        init: From a seed to parameters.
        loss: From parameters and a rank's share of a batch to its mean loss.
        batches: From a seed to batches, for ever.
        score: From parameters to a number, on data that was not seen.
        scored: The name of that number: "accuracy" or "loss".
        rate: The learning rate.
    """

    init: Callable[[int], Any]
    loss: Callable[[Any, Any], jax.Array]
    batches: Callable[[int], Iterator[Any]]
    score: Callable[[Any], float]
    scored: str
    rate: float


def mesh(ranks: int = RANKS) -> Mesh:
    return Mesh(np.array(jax.devices()[:ranks]), ("data",), axis_types=(AxisType.Auto,))


def chosen(sides: dict, only: list[str]) -> dict:
    """The sides with these names; all if there are none."""
    return {name: side for name, side in sides.items() if not only or name in only}


class Run(NamedTuple):
    """The results of one training run.

    Attributes:
        score: Of the parameters at its end.
        losses: By step.
        metrics: Of the last step.
    """

    score: float
    losses: list[float]
    metrics: dict[str, float]


def train(task: Task, tx, steps: int, seeds: Iterable[int] = SEEDS) -> list[Run]:
    """One run for each seed."""
    trainer = sparsejax.data_parallel(task.loss, tx, mesh())
    runs = []
    for seed in seeds:
        state = trainer.init(task.init(seed))
        losses = []
        for batch in itertools.islice(task.batches(seed), steps):
            state, loss = trainer.step(state, batch)
            losses.append(float(loss))
        metrics = jax.device_get(sparsejax.metrics(state.opt_state))
        metrics = {name: float(value) for name, value in metrics.items()}
        runs.append(Run(task.score(jax.device_get(state.params)), losses, metrics))
    return runs


def show(name: str, scores: list[float]) -> None:
    """Prints the mean and spread of the scores of several seeds."""
    each = ", ".join(f"{score:.4f}" for score in scores)
    say(f"  {name:24} {np.mean(scores):.4f} +- {np.std(scores):.4f}  ({each})")


def draw_curves(axes, runs: list[list[float]], name: str, every: int = 1) -> None:
    """The losses by step: a line the mean of the seeds, a band from least to most.

    Args:
        axes: To draw on.
        runs: The losses of each seed.
        name: For the legend.
        every: Of how many steps each of them is the mean.
    """
    sums = np.cumsum(np.array(runs), axis=1)
    smooth = (sums[:, WINDOW:] - sums[:, :-WINDOW]) / WINDOW
    steps = np.arange(WINDOW, sums.shape[1]) * every
    axes.plot(steps, smooth.mean(0), label=name, linewidth=1)
    axes.fill_between(steps, smooth.min(0), smooth.max(0), alpha=0.15)


def _digits(init, logits, rate: float) -> Task:
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = (data.data / 16).astype(np.float32), data.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order], y[order]
    train_x, train_y, test_x, test_y = x[:1400], y[:1400], x[1400:], y[1400:]

    def loss(params, batch):
        scores = logits(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean()

    def batches(seed):
        rng = np.random.default_rng(seed)
        while True:
            chosen = rng.integers(0, len(train_y), 128)
            yield {"x": train_x[chosen], "y": train_y[chosen]}

    def accuracy(params):
        guess = np.argmax(np.asarray(logits(params, test_x)), axis=1)
        return float((guess == test_y).mean())

    return Task(init, loss, batches, accuracy, "accuracy", rate)


def mlp_digits() -> Task:
    """Handwritten digits and two hidden layers."""

    def init(seed):
        rng = np.random.default_rng(seed)
        layers = itertools.pairwise((64, 256, 256, 10))
        return {
            f"layer{i}": (rng.standard_normal((a, b)) * math.sqrt(2 / a)).astype(np.float32)
            for i, (a, b) in enumerate(layers)
        }

    def logits(params, x):
        x = jax.nn.relu(x @ params["layer0"])
        x = jax.nn.relu(x @ params["layer1"])
        return x @ params["layer2"]

    return _digits(init, logits, 0.05)


def vgg_digits() -> Task:
    """Handwritten digits and a small VGG: twice two convolutions and a pool, two layers."""
    shapes = {
        "conv0": (3, 3, 1, 32),
        "conv1": (3, 3, 32, 32),
        "conv2": (3, 3, 32, 64),
        "conv3": (3, 3, 64, 64),
        "hidden": (256, 256),
        "out": (256, 10),
    }

    def init(seed):
        rng = np.random.default_rng(seed)
        normal = lambda shape: (
            rng.standard_normal(shape) * math.sqrt(2 / math.prod(shape[:-1]))
        )
        return {
            name: {
                "kernel": normal(shape).astype(np.float32),
                "bias": np.zeros(shape[-1], np.float32),
            }
            for name, shape in shapes.items()
        }

    def logits(params, x):
        x = x.reshape(-1, 8, 8, 1)
        for i in range(4):
            layer = params[f"conv{i}"]
            kinds = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(
                x, layer["kernel"], (1, 1), "SAME", dimension_numbers=kinds
            )
            x = jax.nn.relu(x + layer["bias"])
            if i % 2:
                n, height, width, channels = x.shape
                x = x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))
        x = x.reshape(len(x), -1)
        x = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        return x @ params["out"]["kernel"] + params["out"]["bias"]

    return _digits(init, jax.jit(logits), 0.05)


def text(vocabulary: int = 20_000, width: int = 64) -> Task:
    """The demo's language model with SGD, and its loss on text it has not seen."""
    from examples import lm_model
    from examples.data import docstrings

    corpus = docstrings.load(vocabulary)
    words = len(corpus.words)
    cut = len(corpus.tokens) * 9 // 10
    held_out = lm_model.batches(corpus.tokens[cut:], words, RANKS, seed=99)
    held_out = list(itertools.islice(held_out, 20))
    first_rank = lambda batch: {k: v[: len(v) // RANKS] for k, v in batch.items()}
    evaluate = jax.jit(lm_model.loss_fn)

    def batches(seed):
        return lm_model.batches(corpus.tokens[:cut], words, RANKS, seed=seed)

    def unseen(params):
        losses = [float(evaluate(params, first_rank(batch))) for batch in held_out]
        return float(np.mean(losses))

    def init(seed):
        return jax.tree.map(jnp.asarray, lm_model.init(words, width, seed))

    return Task(init, lm_model.loss_fn, batches, unseen, "loss", 1.0)
