"""Steps a second of the demo's language model on a real network, by scheme.

    python -m benchmarks.network.end_to_end --hosts 16 --rate 250mbit

The model, the text and the batches are those of `examples.language_model`, one process a
host (Zen, figures 11 and 12; EmbRace, figure 7). All sides train from the same parameters
on the same batches, in turn, a few steps each; losses must agree, and parameters must be
the same bytes on all ranks.

Two sides have gradients by rows, and a lazy optimizer behind them: `rows` adds up listed
rows by `zen_sync`, `rows, gathered` sends all lists to all ranks as they are.
"""

import dataclasses
import hashlib
import itertools
import statistics
import sys
import tempfile
import time

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sparsejax
from benchmarks.harness import figure, settings, sides, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.testbed import host, network, ranks
from examples import lm_model
from examples.data import docstrings
from sparsejax import schemes
from sparsejax.schemes import base
from sparsejax.units.row_grads import RowGrads


LEARNING_RATE = 5e-3


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
}
# How far losses of equal training may be apart: sums are taken in another order.
LOSS = 1e-3


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Trains the demo's language model on a network of a given rate."""

    PROGRAM = "benchmarks.network.end_to_end"
    hosts: tuple[int, ...] = option((4, 16), "numbers of hosts")
    rate: str = option("250mbit", "of each link, each way")
    width: int = option(256, "of the model's tables")
    steps: int = option(3, "of each side in a turn")
    rounds: int = option(3, "turns")

    def __post_init__(self):
        super().__post_init__()
        network.bits_per_second(self.rate)


class Training:
    """A training run with one synchronization, as a side of `sides.timed`."""

    def __init__(self, name: str, mesh: Mesh, params, batches: list):
        self.name = name
        tx = optax.chain(*(make() for make in SIDES[name]))
        self._trainer = sparsejax.data_parallel(lm_model.loss_fn, tx, mesh)
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
            digest.update(np.asarray(leaf.addressable_data(0)).tobytes())
        return digest.hexdigest()


def rank(settings: Settings) -> None:
    """Trains with every side on this host, and reports a row for each."""
    with host.join() as here:
        host.share_compiled()
        mesh = Mesh(np.array(jax.devices()), ("data",))
        sharding = NamedSharding(mesh, P("data"))
        corpus = docstrings.load()
        words = len(corpus.words)

        def placed(x):
            return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

        # One to compile, then a turn more than are counted, each a step longer.
        count = 1 + (settings.rounds + 1) * (settings.steps + 1)
        drawn = lm_model.batches(corpus.tokens, words, here.ranks)
        batches = [jax.tree.map(placed, batch) for batch in itertools.islice(drawn, count)]
        trainings = []
        for name in SIDES:
            params = lm_model.init(words, settings.width)
            trainings.append(Training(name, mesh, params, batches))
            here.say(f"  {name} compiled")
        rows = sides.timed(here, trainings, settings.rounds, settings.steps)
        for training, row in zip(trainings, rows, strict=True):
            same = len(set(here.gather(training.digest()))) == 1
            rate = settings.rate if here.shaped else "unshaped"
            here.report(rate=rate, loss=training.loss, replicas_equal=same, **row)


def main(argv: list[str] | None = None) -> int:
    settings = Settings.parse(argv)
    record = Recorder("end-to-end", settings.command())
    for hosts in settings.hosts:
        with (
            tempfile.TemporaryDirectory() as cache,
            network.hosts(hosts, settings.rate) as net,
        ):
            reported = ranks.run(Settings.PROGRAM, settings, hosts, net, 1800, cache=cache)
        if reported is None:
            return 1
        rows = [sides.together(hosts, of_ranks) for of_ranks in reported]
        for row in rows:
            row["agrees"] = abs(row["loss"] - rows[0]["loss"]) <= LOSS
            row["gain"] = _step(rows[0]) / _step(row)
        title = f"{hosts} hosts, {rows[0]['rate']}, tables of {settings.width} columns"
        table.show(rows, COLUMNS, title)
        record.rows += rows
    say(f"\nwritten: {record.write()} and .csv")
    figure.save("end-to-end", [_line(row) for row in record.rows])
    return 0 if all(row["replicas_equal"] and row["agrees"] for row in record.rows) else 1


def _step(row):
    return statistics.median(row["seconds"])


def _complaint(row):
    complaints = ["REPLICAS DIFFER"] * (not row["replicas_equal"])
    return ", ".join(complaints + ["LOSS DIFFERS"] * (not row["agrees"]))


def _line(row: dict) -> dict:
    """The row's line of the CSV file."""
    return {
        "hosts": row["hosts"],
        "rate": row["rate"],
        "side": row["scheme"],
        "seconds_a_step": _step(row),
        "cpu_s": row["cpu"],
        "bytes": row["sent"],
        "loss": row["loss"],
    }


COLUMNS = [
    Column("side", "scheme"),
    Column("steps/s", lambda row: 1 / _step(row), ".3f"),
    Column("x dense", "gain", ".2f"),
    Column("cpu ms", "cpu", ".0f", 1e3),
    Column("MB sent", "sent", ".2f", 1e-6),
    Column("loss", "loss", ".4f"),
    Column("", _complaint),
]


if __name__ == "__main__":
    sys.exit(main())
