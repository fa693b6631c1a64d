"""One host of `benchmarks.papers.embrace.network`, with all systems that it compares.

Every system trains over all hosts, and once more over a mesh axis of one rank, all hosts at
the same time: the same model, batch and optimizer, and no exchange, since there is no other
rank. What that takes is what a step computes, with the cores as busy as in the other.
"""

import hashlib
import itertools
import pathlib
import time

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sparsejax
from benchmarks.harness import sides
from benchmarks.papers.embrace import tasks
from benchmarks.papers.embrace.network import ALONE, Settings, batches_of, task_of
from benchmarks.papers.embrace.systems import AXIS, SYSTEMS, Training, held
from benchmarks.testbed import host
from sparsejax.embrace import ColumnTable


class Side:
    """A training, as a side of `sides.timed`."""

    def __init__(self, name: str, training: Training, batches: list):
        self.name, self.training = name, training
        self._batches = training.system.feed(itertools.cycle(batches))
        start = time.perf_counter()
        self.run()
        self.compiled = time.perf_counter() - start

    def run(self) -> None:
        self.loss = self.training.step(*next(self._batches))

    def wire(self) -> float | None:
        """Bytes of the last exchange by the library's count, without those of columns."""
        numbers = sparsejax.metrics(self.training.state.opt_state)
        return float(numbers["sync/wire_bytes"])

    def digest(self) -> str:
        """A hash of what is the same on all ranks."""
        digest = hashlib.sha256()
        is_table = lambda node: isinstance(node, ColumnTable)
        for leaf in jax.tree.leaves(self.training.state.params, is_leaf=is_table):
            if not is_table(leaf):
                digest.update(np.asarray(leaf.addressable_data(0)).tobytes())
        return digest.hexdigest()


def rank(settings: Settings) -> None:
    """Trains with every system on this host, and reports a row for each."""
    with host.join() as here:
        host.share_compiled()
        devices, task = np.array(jax.devices()), task_of(settings)
        together = Mesh(devices, (AXIS,))
        alone = Mesh(devices.reshape(-1, 1), ("hosts", AXIS))
        batches = batches_of(pathlib.Path(settings.data), settings.count)
        own = [tasks.of_rank(batch, 0, here.ranks) for batch in batches]
        rooms = tasks.rooms(task, batches, here.ranks)
        trainings, kinds = [], set()

        def add(name, mesh, batches, spec):
            sharding = NamedSharding(mesh, spec)
            place = lambda x: jax.make_array_from_callback(
                x.shape, sharding, lambda at: x[at]
            )
            system = SYSTEMS[name]
            training = Training(
                system,
                task,
                mesh,
                optax.adam(task.rate),
                exact=False,
                rooms=rooms,
            )
            title = name if mesh is together else ALONE + system.alike
            placed = [jax.tree.map(place, batch) for batch in batches]
            trainings.append(Side(title, training, placed))
            here.say(f"  {title:20} compiled in {trainings[-1].compiled:.1f} s")

        for name in settings.systems:
            add(name, together, batches, P(AXIS))
            if SYSTEMS[name].alike not in kinds:
                kinds.add(SYSTEMS[name].alike)
                add(name, alone, own, P())
        rows = sides.timed(here, trainings, settings.rounds, settings.steps)
        for side, row in zip(trainings, rows, strict=True):
            same = len(set(here.gather(side.digest()))) == 1
            tables, kept = held(side.training.state)
            rate = settings.rate if here.shaped else "unshaped"
            about = {"task": settings.task, "rate": rate, "loss": side.loss}
            memory = {"table_bytes": tables, "optimizer_bytes": kept, "rooms": rooms}
            here.report(**about, **memory, replicas_equal=same, **row)
