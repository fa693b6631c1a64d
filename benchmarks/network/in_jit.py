"""Steps under plain `jit` on replicas of shards, on a network of a given rate.

    python -m benchmarks.network.in_jit --rates 100mbit 250mbit 1gbit

Each host has two devices. The mesh is (replica=hosts, fsdp=2): replicas are on different
hosts, and the shards of one replica are inside a host. Two models are trained with Adam:
the demo's language model by `zen_sync`, rows of its tables by a rule, and a decoder, whose
gradient is dense, by `dgc` and `zen_sync`. Sides take turns:

    jit, dense            under `jit`, parameters sharded over fsdp, dense sums of shards
    jit, sparse           the same by `zen_sync`
    jit, rows             the same, tables read and updated by rows (`sparsejax.lazy`), and
                          stored striped over the shards (`rows.StripedRows`)
    shard_map, dense      an own `shard_map`, parameters replicated over all devices
    shard_map, sparse     the same; the tables by two levels, the decoder over all ranks

All start from the same parameters and take the same batches. Parameters must be the same
bytes on all hosts, and the first losses of the lossless sides must agree. The bytes that
the metrics of the sides under `jit` count must be those at the interface of a host. (In
`shard_map` a rank counts what it sends to the other rank of its host, too, which takes no
network.)
`--warm` steps come before any is timed, since residuals grow at first. The table has the
time of a dense step over that of a sparse one, for each form. Writes
benchmarks/results/in-jit-network-*.jsonl, .csv and .png.
"""

import dataclasses
import itertools
import statistics
import sys
import tempfile
import time

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import sparsejax
from benchmarks.harness import figure, settings, sides, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.testbed import host, network, ranks
from benchmarks.training.explicit_models import Decoder
from benchmarks.training.in_jit_steps import TABLES, Model, Run
from examples.data import docstrings


DEVICES, DENSITY = 2, 0.01
# Losses of equal training agree in the first steps; what rounding adds grows after that.
FIRST, AGREE = 4, 1e-3
AXES = ("replica", "fsdp")
MODELS = ("language", "decoder")
FORMS = ("jit", "shard_map")
BOTH = [f"{form}, {kind}" for form in FORMS for kind in ("dense", "sparse")]
SIDES = {"language": [*BOTH, "jit, rows"], "decoder": BOTH}
WINDOWS = {"language": 16, "decoder": 4}  # of each device and step
BY_COLUMNS = P(None, "fsdp")
KEYS = ("model", "shards", "hosts", "rate", "scheme")
NAME, NO_LIMIT = "in-jit-network", "100gbit"


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Trains under jit on replicas of shards, on a network of a given rate."""

    PROGRAM = "benchmarks.network.in_jit"
    hosts: tuple[int, ...] = option((4,), "numbers of hosts")
    rates: tuple[str, ...] = option(("250mbit",), "of each link, each way")
    models: tuple[str, ...] = option(MODELS, "what is trained", choices=MODELS)
    width: int = option(256, "of the language model's tables")
    columns: bool = option(False, "whether shards of tables are columns, and not rows")
    steps: int = option(3, "of each side in a turn")
    rounds: int = option(5, "turns")
    warm: int = option(20, "steps before any is timed")
    timeout: float = option(1800.0, "seconds for each model and number of hosts")
    model: str = option("", "the one that processes train", hidden=True)

    def __post_init__(self):
        super().__post_init__()
        for rate in self.rates:
            network.bits_per_second(rate)


def transformation(
    model: str, form: str, kind: str, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """The synchronization and the optimizer of a side."""
    axis, options = AXES, {}
    if form == "jit":
        axis, options = AXES[0], {"reduce": "sum"}
    parts = []
    if kind == "dense":
        parts.append(sparsejax.dense_sync(axis, **options))
    elif model == "language":
        parts.append(sparsejax.zen_sync(axis, rules=TABLES, **options))
    else:
        parts.append(sparsejax.dgc(DENSITY, axis_name=axis))
        parts.append(sparsejax.zen_sync(axis, two_level=False, **options))
    return optax.chain(*parts, optimizer)


class Training:
    """A training run, as a side of `sides.timed`.

    Attributes:
        name: Of the side.
        compiled: Seconds that it took to trace and compile.
        loss: That of the last step.
        first: Those of the first steps.

    Args:
        name: Of the side.
        of: The name of the model.
        model: The model.
        mesh: The mesh.
        batches: Those that it takes.
    """

    def __init__(self, name: str, of: str, model: Model, mesh, batches: list[dict]):
        self.name, self._steps, self._counted = name, 0, (0, 0.0)
        form, kind = name.split(", ")
        lazy = sparsejax.lazy(optax.adam(1e-3)) if kind == "rows" else None
        tx = transformation(of, form, kind, lazy or optax.adam(1e-3))
        self.of = Run(model, tx, mesh, batches, in_jit=form == "jit", by_rows=lazy)
        start = time.perf_counter()
        self.of.compile()
        self.compiled, self.loss = time.perf_counter() - start, float("nan")
        self.first: list[float] = []

    def run(self) -> None:
        self.loss = float(self.of())
        jax.block_until_ready(self.of.params)
        self._steps += 1
        if self._steps <= FIRST:
            self.first.append(self.loss)

    def wire(self) -> float:
        """Bytes that the devices of a host sent over the axis of the sum, a step.

        It is the mean since the last call.
        """
        total = float(sparsejax.metrics(self.of.state)["sync/total_wire_bytes"])
        (steps, before), self._counted = self._counted, (self._steps, total)
        return DEVICES * (total - before) / (self._steps - steps)


def rank(settings: Settings) -> None:
    """Trains with every side on this host, and reports a row for each."""
    with host.join(DEVICES) as here:
        host.share_compiled()
        mesh = jax.make_mesh((here.ranks, DEVICES), AXES, devices=jax.devices())
        of_replica = [{device.process_index for device in row} for row in mesh.devices]
        assert of_replica == [{number} for number in range(here.ranks)], of_replica
        corpus = docstrings.load()
        model = Model.of_decoder(Decoder())
        if settings.model == "language":
            model = Model.of_language(len(corpus.words), settings.width)
            if settings.columns:
                tables = dict.fromkeys(("input_embedding", "output_embedding"), BY_COLUMNS)
                model = dataclasses.replace(model, specs=model.specs | tables)
        drawn = model.batches(corpus.tokens, mesh.size, windows=WINDOWS[settings.model])
        batches = list(itertools.islice(drawn, FIRST))
        trainings = []
        for name in SIDES[settings.model]:
            if settings.columns and name.endswith("rows"):
                continue  # a row that is read is whole on one device
            trainings.append(Training(name, settings.model, model, mesh, batches))
            here.say(f"  {name} compiled in {trainings[-1].compiled:.1f} s")
        numbers = sum(x.size for x in jax.tree.leaves(model.params))
        shards = "columns" if settings.columns else "rows"
        about = {"model": settings.model, "shards": shards, "numbers": numbers}
        for training in trainings:
            for _ in range(settings.warm):
                training.run()
            training.wire()
        for rate in settings.rates:
            here.set_rate(rate)
            rows = sides.timed(here, trainings, settings.rounds, settings.steps)
            for training, row in zip(trainings, rows, strict=True):
                same = len(set(here.gather(training.of.digest()))) == 1
                about |= {"rate": rate if here.shaped else "unshaped"}
                about |= {"loss": training.loss, "first_losses": training.first}
                about |= {"replicas_equal": same}
                here.report(**about, **row)
            here.say(f"  {rate}: timed")


def main(argv: list[str] | None = None) -> int:
    settings = Settings.parse(argv)
    record = Recorder(NAME, settings.command(), KEYS)
    for model, hosts in itertools.product(settings.models, settings.hosts):
        rows = _measured(hosts, dataclasses.replace(settings, model=model))
        if not rows:
            return 1
        for rate in settings.rates:
            of_rate = [row for row in rows if row["rate"] in (rate, "unshaped")]
            title = f"{model}, {of_rate[0]['numbers']:,} numbers, {hosts} hosts of "
            table.show(of_rate, COLUMNS, title + f"{DEVICES} devices, {rate}")
        record.rows += rows
        say(f"\nwritten: {record.write()}, .csv and .png")
    figure.save(NAME, [_line(row) for row in record.all_rows()], _drawn(record.all_rows()))
    return int(any(_complaint(row) for row in record.rows))


def _measured(hosts, settings):
    """A row for each rate and side; none if a rank failed."""
    with (
        network.hosts(hosts, NO_LIMIT) as net,
        tempfile.TemporaryDirectory() as cache,
    ):
        reported = ranks.run(
            "benchmarks.network.in_jit", settings, hosts, net, settings.timeout, cache=cache
        )
    rows = [sides.together(hosts, of_ranks) for of_ranks in reported or []]
    for row in rows:
        of_rate = [other for other in rows if other["rate"] == row["rate"]]
        form = row["scheme"].split(",")[0]
        dense = next(x for x in of_rate if x["scheme"] == f"{form}, dense")
        samples = zip(dense["seconds"], row["seconds"], strict=True)
        row["times_dense"] = [before / now for before, now in samples]
        differences = np.subtract(row["first_losses"], of_rate[0]["first_losses"])
        row["loss_difference"] = float(np.abs(differences).max())
    return rows


def _complaint(row):
    complaints = ["REPLICAS DIFFER"] * (not row["replicas_equal"])
    lossless = row["model"] == "language" or row["scheme"].endswith("dense")
    complaints += ["LOSS DIFFERS"] * (lossless and not row["loss_difference"] <= AGREE)
    if row["sent"] is not None and row["scheme"].startswith("jit"):
        most = 0.05 * row["wire"] + sides.OTHER * row["hosts"] * DEVICES
        complaints += ["BYTES DISAGREE"] * (abs(row["sent"] - row["wire"]) > most)
    return ", ".join(complaints)


def _step(row):
    return statistics.median(row["seconds"])


def _gain(row):
    return statistics.median(row["times_dense"])


def _line(row):
    """The row's line of the CSV file."""
    return {
        "model": row["model"],
        "shards": row["shards"],
        "hosts": row["hosts"],
        "rate": row["rate"],
        "side": row["scheme"],
        "seconds_a_step": _step(row),
        "times_dense": _gain(row),
        "cpu_s": row["cpu"],
        "network_s": row["network"],
        "bytes": row["sent"],
        "counted": row["wire"],
        "loss": row["loss"],
    }


def _drawn(rows):
    """Times dense by rate: a panel for each model, a line for each side."""
    made, axes = figure.panels(1, len(MODELS))
    for axis, model in zip(axes[0], MODELS, strict=True):
        for side in (name for name in SIDES[model] if not name.endswith("dense")):
            wanted = {"model": model, "scheme": side, "shards": "rows"}
            found = [r for r in rows if wanted.items() <= r.items() and r["sent"]]
            found.sort(key=lambda row: network.bits_per_second(row["rate"]))
            gains = [row["times_dense"] for row in found]
            middle = np.array(list(map(np.median, gains)))
            ends = np.array([[min(one), max(one)] for one in gains]).reshape(-1, 2).T
            bars = np.abs(ends - middle)
            axis.errorbar([r["rate"] for r in found], middle, bars, marker="o", label=side)
        axis.set(title=model, xlabel="rate of a link", ylabel="times dense", ylim=(0, None))
        axis.legend()
    return made


def _range(row):
    low, high = min(row["times_dense"]), max(row["times_dense"])
    return f"{low:.2f} to {high:.2f}"


COLUMNS = [
    Column("side", "scheme"),
    Column("ms", _step, ".0f", 1e3),
    Column("x dense", _gain, ".2f"),
    Column("", _range),
    Column("cpu ms", "cpu", ".0f", 1e3),
    Column("net ms", "network", ".0f", 1e3),
    Column("MB sent", "sent", ".3f", 1e-6),
    Column("counted", "wire", ".3f", 1e-6),
    Column("loss", "loss", ".4f"),
    Column("", _complaint),
]


if __name__ == "__main__":
    sys.exit(main())
