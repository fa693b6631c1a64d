"""Local steps on hosts whose network has a given rate: how much of training is exchange.

    python -m benchmarks.network.local_steps --hosts 16 --rates 100mbit

The decoder of `examples.decoder_local_steps` trains with one device a host. Sides take
turns, in whole rounds of `--every` steps, or in some steps where they exchange in each:

    alone          AdamW on each rank, and no exchange
    sparse_loco    SparseLoCo: an exchange of two-bit entries at the end of each round
    diloco         DiLoCo: a dense mean there
    delayed        the same, applied `--delay` steps later, by one program
    overlap        the same, by a program of its own beside these steps
    streaming      Streaming DiLoCo: a part of the parameters at a time, in four bits
    demo           DeMo: cosine coefficients, in every step
    dgc            the largest hundredth of each gradient, in every step
    data_parallel  dense sums of gradients, in every step

All take the same batches, and meet at the end of a call by the mean of one number. Anchors
must be the same bytes on all hosts, and bytes that metrics count must be those at the
interface of a host. The table has tokens a second as a share of those of `alone`: at least
0.9 is to be reached by `sparse_loco` at 30 steps and 100 Mbit/s. Writes
benchmarks/results/local-steps-network-*.jsonl and .csv.
"""

import dataclasses
import hashlib
import itertools
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from benchmarks.harness import figure, results, settings, sides, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.testbed import host, network, ranks
from examples import decoder_local_steps as example


NAME, NO_LIMIT, AXIS = "local-steps-network", "100gbit", "data"
NEVER = 10**6
# How many steps a timed call has; a whole round where None.
SIDES = {
    "alone": None,
    "sparse_loco": None,
    "diloco": None,
    "delayed": None,
    "overlap": None,
    "streaming": None,
    "demo": 3,
    "dgc": 3,
    "data_parallel": 3,
}
REACH = 0.9
KEYS = ("scheme", "hosts", "rate", "every")


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Trains by local steps on a network of a given rate."""

    PROGRAM = "benchmarks.network.local_steps"
    hosts: tuple[int, ...] = option((16,), "numbers of hosts")
    rates: tuple[str, ...] = option(("100mbit",), "of each link, each way")
    every: int = option(30, "steps in a round")
    delay: int = option(5, "steps after which delayed exchanges are applied")
    sides: tuple[str, ...] = option(tuple(SIDES), "what is timed", choices=tuple(SIDES))
    rounds: int = option(3, "turns")
    timeout: float = option(1800.0, "seconds for each number of hosts")

    def __post_init__(self):
        super().__post_init__()
        for rate in self.rates:
            network.bits_per_second(rate)


def transformation(side: str, every: int, delay: int) -> optax.GradientTransformation:
    """The optimizer of a side."""
    if side == "alone":
        return sparsejax.local_steps(example.adamw(NEVER), every=NEVER)
    if side in ("delayed", "overlap"):
        outer = optax.sgd(example.RATES["diloco"], momentum=0.9, nesterov=True)
        late = {"delay": delay, "blend": 0.5}
        return sparsejax.local_steps(example.adamw(NEVER), every=every, outer=outer, **late)
    method = "streaming_diloco" if side == "streaming" else side
    return example.transformation(method, NEVER, every)


class Training:
    """A training run, as a side of `sides.timed`: a call takes several steps.

    Attributes:
        name: Of the side.
        steps: Of a call.
        compiled: Seconds that it took to trace and compile.
        params: The parameters, or the anchor.
    """

    def __init__(
        self, name: str, settings: Settings, mesh: jax.sharding.Mesh, batches: list
    ):
        self.name, self.steps = name, SIDES[name] or settings.every
        tx = transformation(name, settings.every, settings.delay)
        size, update = example.SIZES["small"], tx.update
        self._overlap = None
        if name == "overlap":
            self._overlap = sparsejax.rounds.Overlap(tx, mesh)
            update = self._overlap.steps.update
        place = lambda x, spec: jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, spec), lambda at: x[at]
        )
        self.params = jax.tree.map(lambda x: place(x, P()), size.init(0))
        self._state = sparsejax.init(tx, self.params, mesh)
        self._batches = itertools.cycle([place(batch, P(AXIS)) for batch in batches])
        specs = sparsejax.state_specs(self._state)

        def step(params, state, tokens):
            own = sparsejax.local(params, AXIS, state)
            loss, grads = jax.value_and_grad(size.loss)(own, tokens)
            updates, state = update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss[None]

        mapped = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), specs, P(AXIS)),
            out_specs=(P(), specs, P(AXIS)),
        )
        start = time.perf_counter()
        jitted = jax.jit(mapped, donate_argnums=(0, 1))
        like = self.params, self._state, next(self._batches)
        self._step = jitted.lower(*like).compile()
        self._mean = jax.jit(jnp.mean)
        self.compiled, self._counted = time.perf_counter() - start, 0.0
        self._calls = 0
        if name in ("delayed", "overlap"):
            # From here on what a call sends is applied in that call.
            self._take(settings.delay)

    def run(self) -> None:
        loss = self._take(self.steps)
        self._calls += 1
        # Ranks that exchange nothing would begin and end apart from one another.
        self._mean(loss).block_until_ready()

    def _take(self, steps: int) -> jax.Array:
        """Takes steps, and waits for them; the losses of the last one."""
        loss = None
        for _ in range(steps):
            made = self._step(self.params, self._state, next(self._batches))
            self.params, self._state, loss = made
            if self._overlap:
                turned = self._overlap.turn(self.params, self._state)
                self.params, self._state = turned
        if self._overlap:
            self._overlap.wait()
        jax.block_until_ready((self.params, self._state))
        assert loss is not None
        return loss

    def wire(self) -> float:
        """Bytes that this rank sent in a call, the mean since the last time asked."""
        total = example.sent(self._state)
        before, self._counted = self._counted, total
        calls, self._calls = self._calls, 0
        return (total - before) / calls

    def digest(self) -> str:
        """A hash of the parameters."""
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(self.params):
            digest.update(np.asarray(leaf.addressable_data(0)).tobytes())
        return digest.hexdigest()


def rank(settings: Settings) -> None:
    """Trains with every side on this host, and reports a row for each."""
    with host.join() as here:
        host.share_compiled()
        mesh = jax.make_mesh((here.ranks,), (AXIS,), devices=jax.devices())
        text = example.Text(example.SIZES["small"], 0)
        batches = list(text.batches(here.ranks, 4))
        trainings = []
        for name in settings.sides:
            trainings.append(Training(name, settings, mesh, batches))
            here.say(f"  {name} compiled in {trainings[-1].compiled:.1f} s")
        tokens = batches[0].shape[0] * (batches[0].shape[1] - 1)
        for rate in settings.rates:
            here.set_rate(rate)
            rows = sides.timed(here, trainings, settings.rounds, calls=1)
            for training, row in zip(trainings, rows, strict=True):
                same = len(set(here.gather(training.digest()))) == 1
                about = {"rate": rate if here.shaped else "unshaped", "tokens": tokens}
                about |= {"steps": training.steps, "every": settings.every}
                about |= {"delay": settings.delay}
                here.report(**about, anchors_equal=same, **row)
            here.say(f"  {rate}: timed")


def main(argv: list[str] | None = None) -> int:
    settings = Settings.parse(argv)
    record = Recorder(NAME, settings.command(), KEYS)
    for hosts in settings.hosts:
        rows = _measured(hosts, settings)
        if not rows:
            return 1
        for rate in settings.rates:
            of_rate = [row for row in rows if row["rate"] in (rate, "unshaped")]
            title = f"{hosts} hosts, rounds of {settings.every} steps, {rate}"
            table.show(of_rate, COLUMNS, title)
        record.rows += rows
        say(f"\nwritten: {record.write()} and .csv")
    figure.save(NAME, [_line(row) for row in record.all_rows()])
    return int(any(_complaint(row) for row in record.rows))


def _measured(hosts, settings):
    """A row for each rate and side; none if a rank failed."""
    with (
        network.hosts(hosts, NO_LIMIT) as net,
        tempfile.TemporaryDirectory() as cache,
    ):
        program = "benchmarks.network.local_steps"
        reported = ranks.run(program, settings, hosts, net, settings.timeout, cache=cache)
    rows = [sides.together(hosts, of_ranks) for of_ranks in reported or []]
    for row in rows:
        of_rate = [other for other in rows if other["rate"] == row["rate"]]
        alone = next((x for x in of_rate if x["scheme"] == "alone"), row)
        pairs = zip(alone["seconds"], row["seconds"], strict=True)
        steps = row["steps"] / alone["steps"]
        row["of_alone"] = [steps * before / now for before, now in pairs]
    return rows


def _share(row):
    return statistics.median(row["of_alone"])


def _complaint(row):
    complaints = ["ANCHORS DIFFER"] * (not row["anchors_equal"])
    if row["sent"] is not None:
        most = 0.05 * row["wire"] + sides.OTHER * row["hosts"] * row["steps"]
        complaints += ["BYTES DISAGREE"] * (abs(row["sent"] - row["wire"]) > most)
    return ", ".join(complaints)


def _line(row):
    """The row's line of the CSV file."""
    return {
        "side": row["scheme"],
        "hosts": row["hosts"],
        "rate": row["rate"],
        "every": row["every"],
        "seconds_a_step": results.a_step(row),
        "tokens_a_second": row["tokens"] / results.a_step(row),
        "of_alone": _share(row),
        "bytes_a_step": None if row["sent"] is None else row["sent"] / row["steps"],
        "counted": row["wire"] / row["steps"],
    }


def _range(row):
    return f"{min(row['of_alone']):.2f} to {max(row['of_alone']):.2f}"


COLUMNS = [
    Column("side", "scheme"),
    Column("ms a step", results.a_step, ".0f", 1e3),
    Column("tokens/s", lambda row: row["tokens"] / results.a_step(row), ",.0f"),
    Column("of alone", _share, ".2f"),
    Column("", _range),
    Column("KB a step", lambda row: (row["sent"] or 0) / row["steps"], ",.1f", 1e-3),
    Column("counted", lambda row: row["wire"] / row["steps"], ",.1f", 1e-3),
    Column("", _complaint),
]


if __name__ == "__main__":
    sys.exit(main())
