"""`all_reduce` of entries that are given, against `lax.psum` of the array that they mean.

    python -m benchmarks.network.entries

Each process has entries of an array, at places of its own, and they are added up over
loopback: as entries, as entries that are made dense at the end, and from dense arrays, by
`all_reduce` and by `lax.psum`. In one process there is nothing to send.
"""

import dataclasses
import statistics
import sys
import time

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sparsejax
from benchmarks.harness import settings, sides, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.testbed import host, ranks


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Times all_reduce of entries against lax.psum of the dense array, over loopback."""

    PROGRAM = "benchmarks.network.entries"
    hosts: tuple[int, ...] = option((1, 4), "numbers of processes")
    size: int = option(4_200_000, "numbers of the array")
    entries: int = option(42_000, "of them each process has")
    samples: int = option(5, "of each side")


class Sum:
    """A way to add up this rank's entries, as a side of `sides.timed`."""

    def __init__(self, name, function, mesh, given):
        self.name = name
        mapped = jax.shard_map(
            lambda *xs: function(*(x[0] for x in xs)),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
        )
        sharding, shape = NamedSharding(mesh, P("data")), (mesh.size,)
        self._given = [
            jax.make_array_from_process_local_data(sharding, x[None], shape + x.shape)
            for x in given
        ]
        start = time.perf_counter()
        self._program = jax.jit(mapped).lower(*self._given).compile()
        self.compiled = time.perf_counter() - start

    def run(self):
        return jax.block_until_ready(self._program(*self._given))

    def wire(self):
        return None

    def check(self, total: np.ndarray) -> None:
        """Ends the process if the sum is wrong."""
        local = jax.tree.map(lambda x: x.addressable_data(0), self.run())
        if isinstance(local, sparsejax.SparseTensor):
            local = local.to_dense()
        if not np.array_equal(local, total):
            raise SystemExit(f"{self.name} is wrong")


def entries_of(rank: int, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """The entries of a rank, shuffled; whole numbers, whose sum no order changes."""
    rng = np.random.default_rng(rank)
    indices = rng.choice(settings.size, settings.entries, replace=False)
    values = rng.integers(1, 9, settings.entries)
    return indices.astype(np.int32), values.astype(np.float32)


def rank(settings: Settings) -> None:
    """Reports a row for each way, on this host."""
    with host.join() as here:
        mesh = Mesh(np.array(jax.devices()), ("data",))
        size, total = settings.size, np.zeros(settings.size, np.float32)
        given = [entries_of(other, settings) for other in range(here.ranks)]
        for indices, values in given:
            total[indices] += values
        mine = given[here.rank]
        array = np.zeros(size, np.float32)
        array[mine[0]] = mine[1]
        # As sparsifiers have them, which select in the order of the array.
        ascending = [x[np.argsort(mine[0])] for x in mine]

        def entries(indices, values):
            tensor = sparsejax.SparseTensor(indices, values, (size,))
            return sparsejax.all_reduce(tensor)

        all_sides = [
            Sum("psum", lambda x: lax.psum(x, "data"), mesh, [array]),
            Sum("all_reduce", sparsejax.all_reduce, mesh, [array]),
            Sum("of entries", entries, mesh, ascending),
            Sum("of entries, shuffled", entries, mesh, mine),
            Sum("of entries, dense", lambda *x: entries(*x).to_dense(), mesh, ascending),
        ]
        for side in all_sides:
            side.check(total)
        for row in sides.timed(here, all_sides, settings.samples):
            here.report(**row)


def main(argv: list[str] | None = None) -> int:
    settings = Settings.parse(argv)
    record = Recorder("entries", settings.command())
    for hosts in settings.hosts:
        reported = ranks.run(Settings.PROGRAM, settings, hosts, None, 900)
        if reported is None:
            return 1
        rows = [sides.together(hosts, of_ranks) for of_ranks in reported]
        for row in rows:
            pairs = zip(row["seconds"], rows[0]["seconds"], strict=True)
            row["of psum"] = statistics.median(ours / psum for ours, psum in pairs)
        table.show(rows, COLUMNS, f"{hosts} processes")
        record.rows += rows
    say(f"\nwritten: {record.write()}")
    return 0


COLUMNS = [
    Column("sum", "scheme"),
    Column("ms", lambda row: statistics.median(row["seconds"]), ".1f", 1e3),
    Column("of psum", "of psum", ".2f"),
    Column("cpu ms", "cpu", ".1f", 1e3),
    Column("compile s", "compile", ".1f"),
]


if __name__ == "__main__":
    sys.exit(main())
