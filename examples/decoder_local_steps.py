"""Trains a decoder by local steps: loss over tokens, and over the bytes that a rank sends.

    python -m examples.decoder_local_steps
    python -m examples.decoder_local_steps --methods diloco sparse_loco --every 20
    python -m examples.decoder_local_steps --plot loss.png --csv loss.csv

A small decoder learns the docstrings of the installed packages, on 8 simulated ranks of one
mesh axis. Each method trains from the same parameters on the same batches:

* `data_parallel`: AdamW on the mean gradient, an exchange in every step.
* `dgc`: the same, of the largest hundredth of each gradient, by `zen_sync`.
* `diloco`: `every` steps of AdamW on each rank, then the mean of the ranks' offsets, by
  Nesterov momentum.
* `streaming_diloco`: a fifth of the parameters in each step, in four bits a number.
* `sparse_loco`: the same steps, then the 64 largest of each 4,096 numbers of a rank's
  offset, in two bits each. Each rank keeps the residual for the next round.
* `demo`: in every step the 32 largest cosine coefficients of each 4,096 numbers of a rank's
  momentum, and the sign of their mean.

The loss on held-out text is that of the anchor, the parameters that all
ranks share. `--size paper` is a decoder for GPUs.
"""

import argparse
import csv
import dataclasses
import math
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import sparsejax
from examples.common import devices
from examples.data import docstrings


@dataclasses.dataclass(frozen=True)
class Size:
    """A decoder and its batches.

    Attributes:
        words: The size of its vocabulary.
        width: Numbers of a word's vector.
        layers: The number of blocks.
        heads: Of each attention.
        length: Words in a window.
        windows: In a batch of one rank.
    """

    words: int
    width: int
    layers: int
    heads: int
    length: int
    windows: int

    def init(self, seed: int) -> dict[str, Any]:
        """The parameters."""
        rng, width, layers = np.random.default_rng(seed), self.width, self.layers

        def normal(*shape, scale=0.02):
            return rng.normal(scale=scale, size=shape).astype(np.float32)

        deep = 0.02 / np.sqrt(2 * layers)
        return {
            "words": normal(self.words, width),
            "positions": normal(self.length, width),
            "blocks": {
                "attention_scale": np.ones((layers, width), np.float32),
                "qkv": normal(layers, width, 3 * width),
                "out": normal(layers, width, width, scale=deep),
                "mlp_scale": np.ones((layers, width), np.float32),
                "up": normal(layers, width, 4 * width),
                "down": normal(layers, 4 * width, width, scale=deep),
            },
            "scale": np.ones(width, np.float32),
            "head": normal(width, self.words),
        }

    def loss(self, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        """The mean loss over windows [n, length + 1]."""

        def block(x, p):
            y = _normed(x, p["attention_scale"]) @ p["qkv"]
            y = y.reshape(*x.shape[:2], 3, self.heads, -1)
            seen = jax.nn.dot_product_attention(*jnp.moveaxis(y, 2, 0), is_causal=True)
            x += seen.reshape(x.shape) @ p["out"]
            return x + jax.nn.gelu(_normed(x, p["mlp_scale"]) @ p["up"]) @ p["down"], None

        x = params["words"][tokens[:, :-1]] + params["positions"]
        x, _ = jax.lax.scan(block, x, params["blocks"])
        logits = _normed(x, params["scale"]) @ params["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()


def _normed(x, scale):
    return scale * x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


SIZES = {
    "small": Size(words=2_000, width=128, layers=2, heads=4, length=64, windows=4),
    "paper": Size(words=32_000, width=1024, layers=16, heads=16, length=1024, windows=16),
}
HELD_OUT = 0.05  # of the text
RATE, WARM_UP = 2e-3, 40
# Of outer optimizers, for short rounds; of `demo` the rate of signs.
RATES = {"diloco": 0.2, "streaming_diloco": 0.2, "sparse_loco": 0.2, "demo": 1e-3}
METHODS = ("data_parallel", "dgc", *RATES)


def schedule(steps: int, rate: float) -> optax.Schedule:
    """A learning rate that warms up, and falls as a cosine."""
    return optax.warmup_cosine_decay_schedule(0.0, rate, WARM_UP, max(steps, WARM_UP + 1))


def adamw(steps: int) -> optax.GradientTransformation:
    """The optimizer of each rank."""
    adam = optax.adamw(schedule(steps, RATE))
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


def transformation(
    method: str, steps: int, every: int, rate: float | None = None, **options: Any
) -> optax.GradientTransformation:
    """A method as an optax transformation.

    Args:
        method: One of `METHODS`.
        steps: Of the whole run, for the learning rate.
        every: Steps in a round.
        rate: Of the outer optimizer, or of `demo`; that of `RATES` if None.
        **options: Of the preset.
    """
    if method == "data_parallel":
        return optax.chain(sparsejax.dense_sync(), adamw(steps))
    if method == "dgc":
        return optax.chain(sparsejax.dgc(0.01), sparsejax.zen_sync(), adamw(steps))
    preset = getattr(sparsejax.rounds, method)
    rate = RATES[method] if rate is None else rate
    if method == "demo":
        return preset(schedule(steps, rate), **options)
    if method == "streaming_diloco":
        late = {"fragments": math.gcd(every, 5), "delay": max(1, every // 10)}
        options = late | options
    return preset(adamw(steps), every=every, lr=rate, **options)


@dataclasses.dataclass
class Curve:
    """The results of a method.

    Attributes:
        tokens: Seen by all ranks, at each evaluation.
        bytes: That a rank has sent for exchanges until then.
        losses: On held-out text.
        seconds: For the run, without compilation and evaluation.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    bytes: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


class Text:
    """Windows of a text, of which the end is held out."""

    def __init__(self, size: Size, seed: int):
        self.size, self.seed = size, seed
        tokens = docstrings.load(size.words).tokens
        cut = int(len(tokens) * (1 - HELD_OUT))
        self.trained, self.held_out = tokens[:cut], tokens[cut:]

    def batches(self, ranks: int, steps: int) -> Iterator[np.ndarray]:
        """One batch of all ranks for each step."""
        rng = np.random.default_rng(self.seed)
        for _ in range(steps):
            yield self._windows(rng, self.trained, self.size.windows * ranks)

    def validation(self, ranks: int) -> np.ndarray:
        """Windows of the held-out text, the same for every seed."""
        rng = np.random.default_rng(0)
        return self._windows(rng, self.held_out, 32 * ranks)

    def _windows(self, rng, tokens, count):
        starts = rng.integers(0, len(tokens) - self.size.length - 1, count)
        return tokens[starts[:, None] + np.arange(self.size.length + 1)]


def sent(opt_state: Any) -> float:
    """The bytes that a rank has sent; a fragment of the parameters is its own exchange."""
    metrics = sparsejax.metrics(opt_state)
    totals = [x for key, x in metrics.items() if key.endswith("/total_wire_bytes")]
    return float(sum(totals))


def train(
    tx: optax.GradientTransformation,
    size: Size,
    text: Text,
    mesh: jax.sharding.Mesh,
    steps: int,
    every: int,
    evaluations: int = 20,
) -> Curve:
    """Trains a decoder, and evaluates the anchor at ends of rounds."""
    trainer = sparsejax.data_parallel(size.loss, tx, mesh)
    state = trainer.init(size.init(text.seed))
    held_out, curve = text.validation(mesh.size), Curve()
    rounds = max(steps // every // evaluations, 1)
    for step, batch in enumerate(text.batches(mesh.size, steps), 1):
        begin = time.perf_counter()
        state, loss = trainer.step(state, batch)
        jax.block_until_ready(loss)
        if step > 1:  # The first one compiles.
            curve.seconds += time.perf_counter() - begin
        if step % (rounds * every) == 0 or step == steps:
            curve.tokens.append(step * batch.shape[0] * size.length)
            curve.bytes.append(sent(state.opt_state))
            curve.losses.append(float(trainer.evaluate(state, held_out)))
    sparsejax.check_replicas(state)
    return curve


def save(curves: dict[str, Curve], path: pathlib.Path) -> None:
    """Writes the curves as CSV."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["method", "tokens", "bytes_of_a_rank", "held_out_loss"])
        for method, curve in curves.items():
            for row in zip(curve.tokens, curve.bytes, curve.losses, strict=True):
                rows.writerow([method, *row])


def plot(curves: dict[str, Curve], path: pathlib.Path) -> None:
    """Draws the loss over tokens, and over bytes."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for method, curve in curves.items():
        axes[0].plot(np.array(curve.tokens) / 1e3, curve.losses, label=method)
        axes[1].plot(np.maximum(curve.bytes, 1), curve.losses, label=method)
    axes[0].set(xlabel="thousand tokens", ylabel="held-out loss")
    axes[1].set(xlabel="bytes that a rank has sent", xscale="log")
    axes[0].legend()
    figure.savefig(path)
    pyplot.close(figure)


def show(console: Console, curves: dict[str, Curve], steps: int) -> None:
    """Prints the last figures of each method."""
    table = Table("method", "held-out loss", "MB a rank sent", "times less", "ms a step")
    most = max(curve.bytes[-1] for curve in curves.values())
    for method, curve in curves.items():
        sent = curve.bytes[-1]
        table.add_row(
            method,
            f"{curve.losses[-1]:.3f}",
            f"{sent / 1e6:,.2f}",
            f"{most / max(sent, 1):,.0f}",
            f"{1e3 * curve.seconds / max(steps - 1, 1):.0f}",
        )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> dict[str, Curve]:
    """Runs the example; `argv` as on the command line. Returns the runs."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.decoder_local_steps", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--methods", nargs="+", choices=METHODS, default=METHODS, help="a run for each")
    add("--ranks", type=int, default=8, help="simulated ranks (8)")
    add("--steps", type=int, default=400, help="steps of each run (400)")
    add("--every", type=int, default=5, help="steps in a round (5)")
    add("--size", choices=[*SIZES], default="small", help="of the decoder (small)")
    add("--seed", type=int, default=0, help="of parameters and batches (0)")
    add("--plot", type=pathlib.Path, help="a PNG of loss over tokens and over bytes")
    add("--csv", type=pathlib.Path, help="the same numbers")
    options = parser.parse_args(argv)
    if min(options.ranks, options.every) < 1 or options.steps < options.every:
        parser.error("--ranks and --every are at least 1, and --steps at least --every")
    mesh = jax.make_mesh(
        (options.ranks,), ("data",), devices=devices.simulated(options.ranks)
    )
    console, size = Console(highlight=False), SIZES[options.size]
    curves: dict[str, Curve] = {}
    for method in options.methods:
        tx = transformation(method, options.steps, options.every)
        text = Text(size, options.seed)
        curves[method] = train(tx, size, text, mesh, options.steps, options.every)
        console.print(f"{method:14} loss {curves[method].losses[-1]:.3f}")
    show(console, curves, options.steps)
    if options.csv:
        save(curves, options.csv)
    if options.plot:
        plot(curves, options.plot)
    return curves


if __name__ == "__main__":
    main()
