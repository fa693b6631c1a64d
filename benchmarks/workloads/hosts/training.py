"""One host of `benchmarks.workloads.network`: an example's runs, in turn."""

import contextlib
import hashlib
import itertools
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.harness import sides
from benchmarks.testbed import host
from benchmarks.workloads.by_columns import COLUMNS, NAME, by_columns, rooms, tables_of
from benchmarks.workloads.collected import Training, collect
from benchmarks.workloads.options import CONSTANTS, DEVICES, Settings
from examples.common import devices
from sparsejax.embrace import ColumnTable


class Side:
    """A training, as a side of `sides.timed`.

    Attributes:
        loss: That of the last step.
    """

    def __init__(self, name: str, training: Training, batches: Sequence[Any]):
        self.name, self._trainer = name, training.trainer
        self.state = self._trainer.init(training.params)
        self._batches = itertools.cycle(batches)
        start = time.perf_counter()
        self.run()
        self.compiled = time.perf_counter() - start

    def run(self) -> None:
        self.state, loss = self._trainer.step(self.state, next(self._batches))
        self.loss = float(loss)

    def wire(self) -> None:
        return None

    def digest(self) -> str:
        """A hash of what is the same on all hosts."""
        digest = hashlib.sha256()
        is_table = lambda node: isinstance(node, ColumnTable)
        for leaf in jax.tree.leaves(self.state.params, is_leaf=is_table):
            if not is_table(leaf):
                for shard in leaf.addressable_shards:
                    digest.update(np.asarray(shard.data))
        return digest.hexdigest()


class Prepared:
    """What a host trains with, and about it.

    Attributes:
        sides: The trainings, compiled.
        about: What rows say of the model.
        params: The first parameters.
        batches: This host's.
    """

    def __init__(self, here: host.Here, settings: Settings):
        example = settings.task
        constants = CONSTANTS.get(example, {})
        argv = ["--devices", "0", "--json", *settings.argv]
        session = collect(example, argv, settings.size, **constants)
        trainings, mesh = dict(session.trainings), session.mesh
        dense = trainings["dense"]
        drawn = [*itertools.islice(dense.batches(0), settings.count)]
        if example in COLUMNS:
            capacity = rooms(example, drawn, here.ranks)
            trainings[NAME] = by_columns(example, trainings["rows"], mesh, capacity)
        wanted = settings.systems or tuple(trainings)
        self.params, self.batches = dense.params, [devices.part(batch) for batch in drawn]
        self.about = about(example, dense.params)
        self.sides = []
        for name in trainings:
            if name in wanted:
                self.sides.append(Side(name, trainings[name], self.batches))
                seconds = self.sides[-1].compiled
                here.say(f"  {name:10} compiled in {seconds:.1f} s")


def about(example: str, params: Any) -> dict[str, Any]:
    """How many numbers a model has, and those of its tables."""
    count = sum(x.size for x in jax.tree.leaves(params))
    tables = tables_of(example, params) if example in COLUMNS else {}
    shapes = [list(x.shape) for x in tables.values()]
    return {"numbers": count, "tables": shapes}


def named(params: Any) -> dict[str, np.ndarray]:
    """Parameters by their paths, as PyTorch's side reads them."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {name(path): np.asarray(x) for path, x in paths}


def _hand_over(here, settings, prepared):
    """Writes what PyTorch's side of this host is to train with."""
    folder = pathlib.Path(settings.data)
    if here.rank == 0:
        np.savez(folder / "params.npz", **named(prepared.params))
    for number, batch in enumerate(prepared.batches):
        np.savez(folder / f"batch-{here.rank}-{number}.npz", **batch)


@contextlib.contextmanager
def joined(settings: Settings) -> Iterator[tuple[host.Here, Prepared]]:
    """This host in the job, with everything compiled."""
    with host.join(DEVICES.get(settings.task, 1)) as here:
        host.share_compiled()
        yield here, Prepared(here, settings)


def rank(settings: Settings) -> None:
    """Trains with every system on this host, and reports a row for each."""
    with joined(settings) as (here, prepared):
        if settings.peers:
            _hand_over(here, settings, prepared)
        rows = sides.timed(here, prepared.sides, settings.rounds, settings.steps)
        for side, row in zip(prepared.sides, rows, strict=True):
            report(here, settings, side, row | prepared.about)


def report(here: host.Here, settings: Settings, side: Any, row: dict) -> None:
    """Reports the row of a side, and whether its parameters are the same on all ranks."""
    same = len(set(here.gather(side.digest()))) == 1
    rate = settings.rate if here.shaped else "unshaped"
    of = {"example": settings.task, "rate": rate, "loss": side.loss}
    here.report(**of, replicas_equal=same, **row)
