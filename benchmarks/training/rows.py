"""A step of a click model's tables by rows, beside the dense step, in one process.

    python -m benchmarks.training.rows [--millions 1 10] [--steps 30]

26 features of 8,192 examples are looked up in one table of 16 numbers a row, and summed
into a logistic loss; Adam. Ids are uniform, or follow a Zipf law as those of clicks do.
Three sides take turns: `dense` (`jax.value_and_grad` and Adam), `exact`
(`sparsejax.lazy`, the same parameters) and `touched` (`exact=False`, rows that are not read
stay as they are). A turn is several steps, as in training, where a step follows one of its
own kind; its first, which finds the caches full of another side's tables, is shown apart
as "after another". Prints the median times, and the temporaries and the compile time of the
program; writes benchmarks/results/rows-*.jsonl. Nothing is sent.
"""

import dataclasses
import itertools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax
from benchmarks.data import clicks
from benchmarks.harness import settings, table
from benchmarks.harness.record import Recorder
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column


WARM = 3  # steps that are not counted
TURN = 10  # steps that a side takes in a row


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Measures a step by rows beside a dense one."""

    PROGRAM = "benchmarks.training.rows"
    millions: tuple[int, ...] = option((1, 10), "rows of the table, in millions")
    steps: int = option(60, "steps of each side that are counted")


def loss_fn(params, batch):
    """The mean logistic loss; a row's first number weighs by itself."""
    ids, clicked = batch
    rows = params["table"][ids].sum(1)
    scores = rows[:, 0] + jnp.square(rows[:, 1:]).sum(1)
    return optax.sigmoid_binary_cross_entropy(scores, clicked).mean()


def dense():
    """The step that a script has without rows."""
    tx = optax.adam(1e-3)

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return tx, step


def by_rows(exact: bool):
    """The step by rows."""
    tx = sparsejax.lazy(optax.adam(1e-3), exact=exact)

    def step(params, state, batch):
        read = tx.reader(params, state) if exact else None
        value_and_grad = sparsejax.value_and_grad(loss_fn, read=read)
        loss, grads = value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params, read=read)
        return sparsejax.apply_updates(params, updates), state, loss

    return tx, step


class Side:
    """A side's program and state.

    Args:
        tx: The optimizer.
        step: A step.
        height: Rows of the table.
    """

    def __init__(self, tx, step, height):
        key = jax.random.key(0)
        params = {"table": 0.01 * jax.random.normal(key, (height, clicks.WIDTH))}
        self.state = params, tx.init(params)
        like = next(clicks.batches(height, "uniform"))
        start = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*self.state, like)
        self.step = lowered.compile()
        self.compile_seconds = time.perf_counter() - start
        analysis = self.step.memory_analysis()
        self.temporaries = analysis.temp_size_in_bytes if analysis else None

    def __call__(self, batch) -> tuple[float, float]:
        """Takes a step; returns its seconds and the loss."""
        start = time.perf_counter()
        *self.state, loss = self.step(*self.state, batch)
        jax.block_until_ready(self.state)
        return time.perf_counter() - start, float(loss)


def measure(record: Recorder, height: int, kind: str, steps: int) -> None:
    """Takes the steps of all sides in turn."""
    sides = {
        "dense": Side(*dense(), height),
        "exact": Side(*by_rows(exact=True), height),
        "touched": Side(*by_rows(exact=False), height),
    }
    seconds, first, losses = ({name: [] for name in sides} for _ in range(3))
    batches = clicks.batches(height, kind)
    for number in range(1 + -(-steps // TURN)):
        turn = list(itertools.islice(batches, TURN if number else WARM))
        for name, side in sides.items():
            taken, found = zip(*map(side, turn), strict=True)
            losses[name] += found
            if number:
                first[name].append(taken[0])
                seconds[name] += taken[1:]
    usual, cold = (float(np.median(x["dense"])) for x in (seconds, first))
    for name, side in sides.items():
        median = float(np.median(seconds[name]))
        after_another = float(np.median(first[name]))
        record.add(
            rows=height,
            ids=kind,
            side=name,
            milliseconds=1e3 * median,
            times_as_fast=usual / median,
            after_another=1e3 * after_another,
            times_as_fast_after=cold / after_another,
            temporaries=side.temporaries,
            compile_seconds=side.compile_seconds,
            loss_difference=float(np.abs(np.subtract(losses[name], losses["dense"])).max()),
            spread=[1e3 * float(x) for x in np.quantile(seconds[name], [0.1, 0.9])],
        )


def main(argv: list[str] | None = None) -> None:
    settings = Settings.parse(argv)
    record = Recorder("rows", settings.command(), ("rows", "ids", "side"))
    for millions in settings.millions:
        for kind in clicks.KINDS:
            measure(record, millions * 1_000_000, kind, settings.steps)
    columns = [
        Column("rows", "rows", ",d"),
        Column("ids", "ids"),
        Column("side", "side"),
        Column("ms a step", "milliseconds", ".1f"),
        Column("times as fast", "times_as_fast", ".2f"),
        Column("after another", "after_another", ".1f"),
        Column("times as fast", "times_as_fast_after", ".2f"),
        Column("temporaries, MiB", "temporaries", ".1f", 2**-20),
        Column("compiled in s", "compile_seconds", ".1f"),
        Column("loss differs by", "loss_difference", ".1e"),
    ]
    table.show(record.rows, columns, "Adam on a table, one process")
    print(f"\nwritten: {record.write()}")


if __name__ == "__main__":
    main(sys.argv[1:])
