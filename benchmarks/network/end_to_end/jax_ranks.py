"""One host: training by every side of the library, and densely."""

import functools
import hashlib
import itertools
import time

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sparsejax
from benchmarks.network.end_to_end import reports, tasks
from benchmarks.network.end_to_end.options import LEARNING_RATE, Settings
from benchmarks.testbed import host
from benchmarks.training import rows as click_model
from examples import lm_model
from sparsejax import schemes
from sparsejax.schemes import base
from sparsejax.units.row_grads import RowGrads


class Unmerged(schemes.AGSparse):
    """Ids and rows of all ranks to all, as they are, which is what Horovod does."""

    def rows(self, tables, wire):
        """The lists one behind another; ids repeat, and an optimizer adds their rows up."""
        totals, sent = [], 0.0
        for grads in tables:
            ids, bytes_of_ids = wire.all_gather(grads.ids)
            rows, bytes_of_rows = wire.all_gather(grads.rows)
            sent += bytes_of_ids + bytes_of_rows
            rows = rows.reshape(-1, *grads.shape[1:])
            totals.append(RowGrads(ids.reshape(-1), rows, grads.shape))
        dense = sum(wire.dense_bytes(grads.size, grads.dtype) for grads in tables)
        stages = base.stage(sent, sent, 1), base.stage()
        return base.SummedRows(totals, base.traffic(*stages, dense=dense))


def adam() -> optax.GradientTransformation:
    """The optimizer, as a script has it."""
    return optax.adam(LEARNING_RATE)


def by_rows() -> optax.GradientTransformation:
    """The same, on the rows that batches read."""
    return sparsejax.lazy(adam())


# How gradients are averaged, and who takes the step.
SIDES = {
    "dense": (sparsejax.dense_sync, adam),
    "agsparse": (lambda: sparsejax.sync(schemes.AGSparse()), adam),
    "zen": (sparsejax.zen_sync, adam),
    "rows, gathered": (lambda: sparsejax.sync(Unmerged()), by_rows),
    "rows": (sparsejax.zen_sync, by_rows),
    "rows, capacity": (sparsejax.zen_sync, by_rows),
}
# Those of a task, and whether there is memory for all of them at once.
OF_TASK = {
    "language": (tuple(name for name in SIDES if name != "rows, capacity"), True),
    "clicks": (("dense", "rows, gathered", "rows", "rows, capacity"), False),
}


def _click_loss(params, batch):
    return click_model.loss_fn(params, (batch["ids"], batch["clicked"]))


LOSS = {"language": lm_model.loss_fn, "clicks": _click_loss}


class Training:
    """A training run with one synchronization, as a side of `sides.timed`."""

    def __init__(self, name: str, settings: Settings, mesh: Mesh, params, batches: list):
        self.name = name
        tx = optax.chain(*(make() for make in SIDES[name]))
        self._trainer = sparsejax.data_parallel(
            LOSS[settings.task],
            tx,
            mesh,
            capacity=settings.capacity if name == "rows, capacity" else None,
        )
        self.state = self._trainer.init(params)
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
        """A hash of this rank's parameters."""
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(self.state.params):
            digest.update(np.asarray(leaf.addressable_data(0)))
        return digest.hexdigest()


def rank(settings: Settings) -> None:
    """Trains with every side on this host, and reports a row for each."""
    with host.join() as here:
        host.share_compiled()
        mesh = Mesh(np.array(jax.devices()), ("data",))
        sharding = NamedSharding(mesh, P("data"))
        task = tasks.read(settings)

        def placed(x):
            return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

        batches = [jax.tree.map(placed, batch) for batch in task.batches]
        names, together = OF_TASK[settings.task]
        names = [name for name in names if name in (settings.sides or names)]
        train = functools.partial(Training, settings=settings, mesh=mesh, batches=batches)

        def turns(names):
            trainings = []
            for name in names:
                trainings.append(train(name, params=task.params))
                here.say(f"  {name} compiled")
            reports.timed(here, settings, trainings)

        for group in [names] if together else [[name] for name in names]:
            turns(group)
