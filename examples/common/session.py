"""The loop of an example: a run for each synchronization, its progress and its results."""

import argparse
import contextlib
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import sparsejax
from examples.common import checkpoints, devices, report
from examples.common.feeding import Batches
from examples.common.report import Run


class Session:
    """The runs of an example, and their output.

    Args:
        options: From `command.parse`.
        mesh: The devices.
        origin: The data and versions on which the figures depend. A checkpoint of another
            origin is refused.
    """

    def __init__(self, options: argparse.Namespace, mesh: Mesh, origin: Mapping[str, Any]):
        self._options, self._mesh = options, mesh
        self._origin = dict(origin)
        self.runs: dict[str, Run] = {}
        quiet = not devices.is_first_host()
        self.console = Console(stderr=options.json, highlight=False, quiet=quiet)

    def about(self, data: str, model: str) -> None:
        """Prints the model and the data.

        Args:
            data: The amount of it.
            model: Its parts.
        """
        versions = self._origin.get("versions", {}).items()
        of = ", ".join(f"{name} {version}" for name, version in versions)
        kind = "simulated devices" if self._options.devices else "devices"
        self.console.print(
            f"Data: {data} (of {of}; SHA-256 {self._origin['sha256']})\n"
            f"Model: {model}\n"
            f"On {self._mesh.size} {kind}",
            soft_wrap=True,
        )

    def train(
        self,
        name: str,
        trainer: sparsejax.training.DataParallel,
        params: Any,
        batches: Batches,
        optimizer: optax.GradientTransformation | None = None,
        scores: Callable[[Any], dict[str, float]] | None = None,
    ) -> Run:
        """Trains for the requested steps, from a checkpoint if that was requested.

        Args:
            name: Of the run: its synchronization.
            trainer: From `sparsejax.data_parallel`.
            params: To begin with.
            batches: From a step to the batches of all devices from that step on.
            optimizer: The optimizer after the synchronization, if it may be a lazy one: at
                the end it catches up on rows that were not read recently.
            scores: From parameters to figures of them, such as an accuracy.
        """
        options, state = self._options, trainer.init(params)
        with contextlib.ExitStack() as stack:
            store, start = None, 0
            if options.checkpoint:
                folder = pathlib.Path(options.checkpoint, name)
                store = checkpoints.Checkpoints(folder, self._about(name))
                if options.resume:
                    state = store.restore(state, options.steps)
                    start = int(state.step)
                else:
                    store.require_none()
            log = stack.enter_context(_Curves(options.logdir, name))
            show = stack.enter_context(_Progress(self.console, name, options.steps))
            losses, seconds, metrics = [], [], []
            steps = range(start + 1, options.steps + 1)
            for step, batch in zip(steps, batches(start), strict=False):
                begin = time.perf_counter()
                state, loss = trainer.step(state, devices.part(batch))
                losses.append(float(loss))  # Waits for the step.
                seconds.append(time.perf_counter() - begin)
                sent = sparsejax.metrics(state.opt_state)
                metrics.append({key: float(value) for key, value in sent.items()})
                log(step, {"loss": losses[-1], "seconds": seconds[-1]} | metrics[-1])
                show(step, losses[-1])
                last = step == options.steps
                if store is not None and (last or step % options.save_every == 0):
                    store.save(step, state)
        params = state.params
        if isinstance(optimizer, sparsejax.rows.Lazy):
            params, _ = sparsejax.rows.settle(params, state.opt_state, optimizer)
        params = jax.tree.map(report.numbers, params)
        self.runs[name] = Run(
            losses,
            {key: statistics.fmean(m[key] for m in metrics) for key in metrics[0]},
            params,
            devices.replicas_equal(state.params),
            *report.seconds(seconds),
            scores(params) if scores else {},
        )
        return self.runs[name]

    def _about(self, name):
        """The description of the run in a checkpoint, in addition to its arrays."""
        options = self._options
        return {
            "the example": options.example,
            "--sync": name,
            "--size": options.size,
            "--seed": options.seed,
            "the data": self._origin.get("sha256", "none"),
        }

    def finish(self) -> "Session":
        """Shows the figures of all runs, in the requested form; returns itself."""
        if not devices.is_first_host():
            return self
        figures = report.figures(self.runs)
        if self._options.json:
            versions = self._origin.get("versions", {})
            origin = self._origin | {
                "versions": versions | {"sparsejax": sparsejax.__version__},
                "devices": self._mesh.size,
            }
            print(report.as_json(figures | origin))
        else:
            report.show(self.console, figures, simulated=bool(self._options.devices))
        if self._options.plot:
            report.plot(self.runs, self._options.plot)
            self.console.print(f"The curves are in {self._options.plot}.")
        return self


class _Curves:
    """Scalars for TensorBoard, a folder for each run; or nothing, without a folder."""

    def __init__(self, folder, name):
        self._writer = None
        if folder and devices.is_first_host():
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(pathlib.Path(folder, name)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._writer:
            self._writer.close()

    def __call__(self, step, scalars):
        if self._writer:
            for key, value in scalars.items():
                self._writer.add_scalar(key.replace(" ", "_"), value, step)


class _Progress:
    """A bar on a terminal, else a line now and then."""

    def __init__(self, console, name, steps):
        self._console, self._name, self._steps = console, name, steps
        self._bar = Progress(
            TextColumn("{task.description:8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=steps, loss="")
        self._first = True

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *_):
        self._bar.stop()

    def __call__(self, step, loss):
        self._bar.update(self._task, completed=step, loss=f"{loss:.3f}")
        is_shown = self._first or step in (self._steps // 2, self._steps)
        if is_shown and not self._console.is_terminal:
            self._console.print(
                f"{self._name:8} step {step:4} of {self._steps}  loss {loss:.3f}"
            )
        self._first = False
