"""What it costs to compare replicas at every 100th step, in one process.

    python -m benchmarks.training.replicas [--repeats N]

On four simulated devices, for a network of few wide layers and one of many narrow ones,
with a dense sum and with Zen, and Adam: the seconds of a step and of one
`sparsejax.check_replicas` of all of its state, in turn, and what a check at every 100th
step adds to a step. A batch has few examples, so steps are as short as they can be beside
the state that is read. Before anything is timed a flipped bit is to be found. Writes
benchmarks/results/replicas-*.jsonl.
"""

import dataclasses
import itertools
import sys
import time

import jax


RANKS, EVERY = 4, 100
jax.config.update("jax_num_cpu_devices", RANKS)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

import sparsejax  # noqa: E402
from benchmarks.harness import settings, table, timing  # noqa: E402
from benchmarks.harness.record import Recorder, say  # noqa: E402
from benchmarks.harness.settings import option  # noqa: E402
from benchmarks.harness.table import Column  # noqa: E402


EXAMPLES = 8  # of a rank
SHAPES = {"wide": (1024, 4), "deep": (128, 64)}  # the width, and the number of layers
SYNCS = {"dense": sparsejax.dense_sync, "zen": sparsejax.zen_sync}


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Measures what comparing replicas adds to a step."""

    PROGRAM = "benchmarks.training.replicas"
    repeats: int = option(7, "samples of each side")


def network(width: int, layers: int):
    """The parameters of a network, and its loss."""
    rng = np.random.default_rng(0)
    params = [
        {
            "kernel": rng.standard_normal((width, width), np.float32) / np.sqrt(width),
            "bias": np.zeros(width, np.float32),
        }
        for _ in range(layers)
    ]

    def loss(params, x):
        for layer in params:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return jnp.mean(jnp.square(x))

    return params, loss, np.ones((RANKS * EXAMPLES, width), np.float32)


class Run:
    """A run that is going on.

    Args:
        shape: Which network.
        sync: How its gradients are summed.
    """

    def __init__(self, shape: str, sync: str):
        params, loss, self.batch = network(*SHAPES[shape])
        mesh = Mesh(np.array(jax.devices()), ("data",))
        tx = optax.chain(SYNCS[sync](), optax.adam(1e-3))
        self.trainer = sparsejax.data_parallel(loss, tx, mesh)
        self.state = self.trainer.init(params)
        self.numbers = sum(x.size for x in jax.tree.leaves(self.state))
        self.leaves = len(jax.tree.leaves(self.state))

    def step(self):
        """Takes a step."""
        self.state, loss = self.trainer.step(self.state, self.batch)
        return loss

    def check(self) -> None:
        """Compares the state."""
        sparsejax.check_replicas(self.state)

    def finds_a_bit(self) -> bool:
        """Whether one flipped bit of a rank is found."""
        leaf = self.state.params[0]["kernel"]
        copies = [np.array(shard.data) for shard in leaf.addressable_shards]
        copies[2].view(np.uint32)[3, 5] ^= 1
        devices = [shard.device for shard in leaf.addressable_shards]
        pieces = [*map(jax.device_put, copies, devices)]
        make = jax.make_array_from_single_device_arrays
        apart = make(leaf.shape, leaf.sharding, pieces)
        first = {**self.state.params[0], "kernel": apart}
        state = self.state._replace(params=[first, *self.state.params[1:]])
        try:
            sparsejax.check_replicas(state)
        except sparsejax.errors.ReplicaError as error:
            return "rank 2" in str(error)
        return False


def measure(record: Recorder, shape: str, sync: str, repeats: int) -> None:
    """Times a step and a check in turn."""
    run = Run(shape, sync)
    jax.block_until_ready(run.step())
    start = time.perf_counter()
    run.check()
    first = time.perf_counter() - start
    if not run.finds_a_bit():
        raise SystemExit(f"{shape}, {sync}: a flipped bit was not found")
    times = timing.alternate({"step": run.step, "check": run.check}, repeats)
    step, check = (float(np.median(times[name])) for name in ("step", "check"))
    record.add(
        network=shape,
        sync=sync,
        leaves=run.leaves,
        numbers=run.numbers,
        step=step,
        check=check,
        added=check / (EVERY * step),
        first_check=first,
        seconds=times,
    )


def main(argv: list[str] | None = None) -> None:
    settings = Settings.parse(argv)
    record = Recorder("replicas", settings.command(), ("network", "sync"))
    for shape, sync in itertools.product(SHAPES, SYNCS):
        measure(record, shape, sync, settings.repeats)
    columns = [
        Column("network", "network"),
        Column("sync", "sync"),
        Column("leaves", "leaves", "d"),
        Column("M numbers", "numbers", ".1f", 1e-6),
        Column("step, ms", "step", ".2f", 1e3),
        Column("check, ms", "check", ".2f", 1e3),
        Column(f"% of a step at every {EVERY}th", "added", ".2f", 100),
        Column("first check, s", "first_check", ".2f"),
    ]
    table.show(record.rows, columns, f"Comparing replicas on {RANKS} simulated devices")
    say(f"\nwritten: {record.write()}")


if __name__ == "__main__":
    main(sys.argv[1:])
