"""Trains a language model three times: densely, with sparse gradients, and by rows.

    python -m examples.language_model

Eight simulated devices train in data parallel on the docstrings of the packages installed
here. The runs differ in nothing but the optax transformation: `dense` averages gradients
as they are, `zen` sends what is not zero, and `rows` has a lazy optimizer behind that, so
that rows of tables which a batch does not read are not touched at all. The losses agree;
the bytes that each rank sends do not.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import sparsejax
from examples import lm_model, lm_report
from examples.data import docstrings
from examples.lm_report import Run


WIDTH = 64
LEARNING_RATE = 5e-3


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the example; `argv` as on the command line."""
    args = _arguments(argv)
    console = Console(stderr=args.json, highlight=False)
    mesh = _simulated_devices(args.devices)
    console.print("Reading the docstrings of the installed packages ...")
    corpus = docstrings.load()
    lm_report.describe(console, corpus, mesh, WIDTH)
    runs = {}
    with _progress(console) as progress:
        for name, sync, optimizer in (
            ("dense", sparsejax.dense_sync(), optax.adam(LEARNING_RATE)),
            ("zen", sparsejax.zen_sync(), optax.adam(LEARNING_RATE)),
            ("rows", sparsejax.zen_sync(), sparsejax.lazy(optax.adam(LEARNING_RATE))),
        ):
            batches = islice(
                lm_model.batches(corpus.tokens, len(corpus.words), args.devices), args.steps
            )
            params = lm_model.init(len(corpus.words), WIDTH)
            report = progress(name, args.steps)
            runs[name] = _train(sync, optimizer, mesh, params, batches, report)
    figures = lm_report.figures(runs)
    if args.json:
        print(json.dumps(figures | lm_report.origin(corpus, mesh)))
    else:
        lm_report.show(console, figures)
    if args.plot:
        lm_report.plot(runs, args.plot)
        console.print(f"The curves are in {args.plot}.")


def _train(
    sync: optax.GradientTransformation,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    params: dict[str, np.ndarray],
    batches: Iterator[dict[str, np.ndarray]],
    report: Callable[[int, float], None],
) -> Run:
    """Trains with one way to average gradients, and to apply them."""
    tx = optax.chain(sync, optimizer)
    trainer = sparsejax.data_parallel(lm_model.loss_fn, tx, mesh)
    state = trainer.init(params)
    losses, seconds, metrics = [], [], []
    for step, batch in enumerate(batches, start=1):
        start = time.perf_counter()
        state, loss = trainer.step(state, batch)
        losses.append(float(loss))  # Waits for the step.
        seconds.append(time.perf_counter() - start)
        sent = sparsejax.metrics(state.opt_state)
        metrics.append({key: float(value) for key, value in sent.items()})
        report(step, losses[-1])
    step_seconds = statistics.median(seconds[1:])
    params = state.params
    if isinstance(optimizer, sparsejax.rows.Lazy):
        # Rows that were not read for a while are late.
        params, _ = sparsejax.rows.settle(params, state.opt_state, optimizer)
    return Run(
        losses,
        {key: statistics.fmean(m[key] for m in metrics) for key in metrics[0]},
        jax.device_get(params),
        _replicas_equal(state.params),
        seconds[0] - step_seconds,
        step_seconds,
    )


def _replicas_equal(params: Any) -> bool:
    """Whether every device holds the same bytes."""
    return all(
        len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1
        for leaf in jax.tree.leaves(params)
    )


def _simulated_devices(count: int) -> Mesh:
    """A mesh of simulated CPU devices, which must be asked for before JAX starts."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:
        pass  # JAX has started, maybe with enough of them.
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise SystemExit(f"{count} devices were asked for; JAX has started {len(devices)}.")
    return Mesh(np.array(devices[:count]), ("data",))


class _progress:
    """A bar for each run on a terminal, else a line now and then."""

    def __init__(self, console: Console):
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description:6}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "_progress":
        self._bars.start()
        return self

    def __exit__(self, *_) -> None:
        self._bars.stop()

    def __call__(self, name: str, steps: int) -> Callable[[int, float], None]:
        """Starts a run, and returns a function to call with each step and its loss."""
        task = self._bars.add_task(name, total=steps, loss="")

        def report(step, loss):
            self._bars.update(task, completed=step, loss=f"{loss:.3f}")
            if not self._console.is_terminal and step in (1, steps // 2, steps):
                self._console.print(f"{name:6} step {step:4} of {steps}  loss {loss:.3f}")

        return report


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.language_model", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=100, help="steps of each run (100)")
    parser.add_argument("--devices", type=int, default=8, help="simulated devices (8)")
    parser.add_argument(
        "--plot",
        nargs="?",
        const="demo.png",
        metavar="FILE",
        help="plot to demo.png or FILE",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(argv)
    if args.steps < 2 or args.devices < 1:
        parser.error("it takes at least two steps and one device")
    return args


if __name__ == "__main__":
    main()
