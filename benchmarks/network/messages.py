"""Times of the collectives of an exchange by themselves, on a network of a given rate.

    python -m benchmarks.network.messages --rates 100mbit 250mbit 1gbit

No scheme can be faster than its messages. Each collective runs alone, over all hosts of the
testbed, at a few sizes: the maximum of three numbers on which ranks agree, an all-to-all,
the gather around gloo's ring, the sum of as many bytes as an all-to-all sends, and a
permutation in which each two hosts swap; between two hosts also the swap by a
reduce-scatter. The column `link` is the time of the bytes on the link; the rest is gloo,
and waking processes. `benchmarks.network.scale` makes a model of these rows.
"""

import dataclasses
import functools
import statistics
import sys

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks.harness import settings, sides, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.testbed import host, network, ranks


CALLS, SAMPLES = 5, 3


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Times the collectives of an exchange on a network of a given rate."""

    PROGRAM = "benchmarks.network.messages"
    hosts: tuple[int, ...] = option((2, 4, 8, 16), "numbers of hosts")
    rates: tuple[str, ...] = option(("250mbit",), "of each link, each way")
    kilobytes: tuple[int, ...] = option((1, 32, 128, 512), "sizes of a message")

    def __post_init__(self):
        super().__post_init__()
        for rate in self.rates:
            network.bits_per_second(rate)


class Message:
    """A collective on messages of one size, as a side of `sides.timed`."""

    def __init__(self, collective: str, size: int, function, mesh: Mesh):
        self.collective, self.size, self.compiled = collective, size, 0.0
        self.name = f"{collective} of {size} bytes"
        n, words = mesh.size, size // 4
        self._x = jax.make_array_from_callback(
            (n * n, words),
            NamedSharding(mesh, P("data")),
            lambda at: np.ones((n, words), np.float32),
        )
        mapped = jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        self._program = jax.jit(mapped).lower(self._x).compile()

    def run(self) -> jax.Array:
        return jax.block_until_ready(self._program(self._x))

    def wire(self) -> None:
        return None

    def check(self, ranks: int) -> None:
        """Ends the process if the result is wrong; all ranks have ones."""
        expected = ranks if self.collective.startswith("psum") else 1
        if not (np.asarray(self.run().addressable_data(0)) == expected).all():
            raise SystemExit(f"{self.name} is wrong")


def collectives(ranks: int) -> dict:
    """By name, functions of a rank's [ranks, words]."""
    alike = lambda function: lambda x: lax.pcast(function(x), "data", to="varying")
    by_name = {
        "all_to_all": lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True),
        "all_gather": lambda x: lax.all_gather(x[0], "data"),
        "psum": alike(lambda x: lax.psum(x[: ranks // 2], "data")),
    }
    if ranks % 2 == 0:
        pairs = [(rank, rank ^ 1) for rank in range(ranks)]
        by_name["ppermute"] = lambda x: lax.ppermute(x[:1], "data", pairs)
    if ranks == 2:
        scatter = functools.partial(lax.psum_scatter, scatter_dimension=0, tiled=True)
        by_name["psum_scatter"] = lambda x: scatter(x, "data")
    return by_name


def rank(settings: Settings) -> None:
    """Reports a row for each collective and size, on this host."""
    with host.join() as here:
        mesh = Mesh(np.array(jax.devices()), ("data",))
        agree = lambda x: lax.pcast(lax.pmax(x[:1], "data"), "data", to="varying")
        messages = [Message("pmax", 12, agree, mesh)]
        messages += [
            Message(name, 1024 * kilobytes, function, mesh)
            for kilobytes in settings.kilobytes
            for name, function in collectives(mesh.size).items()
        ]
        for message in messages:
            message.check(mesh.size)
        for rate in settings.rates:
            here.set_rate(rate)
            for message in messages:
                (row,) = sides.timed(here, [message], SAMPLES, CALLS)
                row |= {"collective": message.collective, "bytes": message.size}
                here.report(rate=rate if here.shaped else "unshaped", **row)


def main(argv: list[str] | None = None) -> int:
    settings = Settings.parse(argv)
    record = Recorder("messages", settings.command())
    for hosts in settings.hosts:
        with network.hosts(hosts, settings.rates[0]) as net:
            reported = ranks.run(Settings.PROGRAM, settings, hosts, net, 900)
        if reported is None:
            return 1
        rows = [sides.together(hosts, of_ranks) for of_ranks in reported]
        for rate in settings.rates:
            of_rate = [row for row in rows if row["rate"] in (rate, "unshaped")]
            table.show(of_rate, COLUMNS, f"{hosts} hosts, {rate}")
        record.rows += rows
    say(f"\nwritten: {record.write()}")
    return 0


COLUMNS = [
    Column("collective", "collective"),
    Column("bytes", "bytes", "d"),
    Column("ms", lambda row: statistics.median(row["seconds"]), ".1f", 1e3),
    Column("link ms", "network", ".1f", 1e3),
    Column("cpu ms", "cpu", ".2f", 1e3),
]


if __name__ == "__main__":
    sys.exit(main())
