"""What it takes to save a state and to go on from it, on as many ranks and on others.

    python -m benchmarks.training.checkpoints [--sizes MIB ...]

In one process, on four simulated devices: parameters, Adam's moments and what DGC holds
back on each rank, of several sizes. Each is saved, restored on four ranks, where every
device reads its own part, and restored on two, where what ranks held is read whole and
shared out. All are timed in turn; what is restored on four is compared as bytes. Beside the
times is how they grow: seconds over bytes, of the largest state over the smallest, which is
1 where time is linear in bytes, and less where it also has a fixed part. Writes
benchmarks/results/checkpoints-*.jsonl.
"""

import dataclasses
import itertools
import pathlib
import sys
import tempfile

import jax


RANKS, OTHERS = 4, 2
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
from sparsejax.training import DataParallel  # noqa: E402


LEAVES = 8
SIDES = ("save", "restore", "restore on others")


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Measures saving and restoring."""

    PROGRAM = "benchmarks.training.checkpoints"
    sizes: tuple[float, ...] = option((4.0, 16.0, 64.0), "MiB of parameters")
    repeats: int = option(5, "samples of each side")


def loss_fn(params, x):
    return sum(jnp.square(leaf).sum() for leaf in params.values()) * x.mean()


class Case:
    """A state of one size, its checkpoint, and fresh states to restore into.

    Args:
        mib: MiB of parameters.
        folder: Of the checkpoints.
    """

    def __init__(self, mib: float, folder: pathlib.Path):
        rng = np.random.default_rng(0)
        rows = int(mib * 2**20 / LEAVES / 4 / 256)
        self._params = {
            f"layer {i}": rng.standard_normal((rows, 256), np.float32)
            for i in range(LEAVES)
        }
        trainer, state = self._fresh(RANKS)
        self.state, _ = trainer.step(state, np.ones(RANKS, np.float32))  # residuals, too
        self._like = {
            "restore": self._fresh(RANKS)[1],
            "restore on others": self._fresh(OTHERS)[1],
        }
        self._folder, self._numbers = folder, itertools.count()
        self._last = self.save()
        self.bytes = sum(x.nbytes for x in jax.tree.leaves(self.state))

    def _fresh(self, ranks: int) -> tuple[DataParallel, sparsejax.TrainState]:
        mesh = Mesh(np.array(jax.devices()[:ranks]), ("data",))
        tx = optax.chain(sparsejax.dgc(0.01), sparsejax.zen_sync(), optax.adam(1e-3))
        trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
        return trainer, trainer.init(self._params)

    def save(self) -> pathlib.Path:
        """Writes a checkpoint; returns its path."""
        path = self._folder / str(next(self._numbers))
        sparsejax.save(path, self.state)
        self._last = path
        return path

    def restore(self, side: str) -> sparsejax.TrainState:
        """Goes on from the last checkpoint."""
        return jax.block_until_ready(sparsejax.restore(self._last, self._like[side]))

    def sides(self) -> dict:
        """What is timed, by name."""
        return {
            "save": self.save,
            "restore": lambda: self.restore("restore"),
            "restore on others": lambda: self.restore("restore on others"),
        }

    def is_whole(self) -> bool:
        """Whether the bytes that come back on as many ranks are those that were saved."""
        pairs = zip(
            *map(jax.tree.leaves, (self.state, self.restore("restore"))), strict=True
        )
        return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def main(argv: list[str] | None = None) -> None:
    settings = Settings.parse(argv)
    record = Recorder("checkpoints", settings.command(), ("side", "mib"))
    for mib in settings.sizes:
        with tempfile.TemporaryDirectory() as folder:
            case = Case(mib, pathlib.Path(folder))
            if not case.is_whole():
                raise SystemExit(f"{mib} MiB: other bytes came back than were saved")
            times = timing.alternate(case.sides(), settings.repeats)
        for side in SIDES:
            median = float(np.median(times[side]))
            about = {"side": side, "mib": mib, "bytes": case.bytes, "seconds": times[side]}
            record.add(**about, per_byte=median / case.bytes)
    for row in record.rows:
        least = min((r for r in record.rows if r["side"] == row["side"]), key=_bytes)
        row["growth"] = row["per_byte"] / least["per_byte"]
    columns = [
        Column("side", "side"),
        Column("state, MB", "bytes", ".0f", 1e-6),
        Column("ms", lambda row: float(np.median(row["seconds"])), ".0f", 1e3),
        Column("ms a MB", "per_byte", ".2f", 1e9),
        Column("over the smallest", "growth", ".2f"),
    ]
    table.show(record.rows, columns, f"Checkpoints of {RANKS} ranks, and {OTHERS} others")
    say(f"\nwritten: {record.write()}")


def _bytes(row: dict) -> int:
    return row["bytes"]


if __name__ == "__main__":
    main(sys.argv[1:])
