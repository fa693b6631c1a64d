"""Whether XLA:CPU overlaps a reduction with a computation that does not need it.

    python -m benchmarks.schedule.cpu --rate 100mbit

On two hosts of the testbed, one program sums an array over the ranks, one multiplies
matrices, and two do both: of one, neither result depends on the other, of the other the
second waits for the first behind a barrier. If the first takes as long as the longer part,
they overlap; if as long as both parts together, they do not.
"""

import dataclasses
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks.harness import settings, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.testbed import host, network, ranks


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Times a reduction, a computation, and both in one program, on two hosts."""

    PROGRAM = "benchmarks.schedule.cpu"
    rate: str = option("100mbit", "of each link, each way")
    numbers: int = option(1 << 20, "that are summed")
    width: int = option(512, "of the matrices")
    products: int = option(48, "of matrices, one after the other")
    samples: int = option(7, "of each program, which alternate")

    def __post_init__(self):
        super().__post_init__()
        network.bits_per_second(self.rate)


def programs(given: Settings) -> dict:
    """By name, functions of a rank's numbers and matrices."""

    def reduce(x, w):
        return lax.psum(x, "data"), w

    def compute(x, w):
        h = w
        for _ in range(given.products):
            h = jnp.tanh(h @ w)
        return x, h

    def both(x, w):
        return reduce(x, w)[0], compute(x, w)[1]

    def behind(x, w):
        total = reduce(x, w)[0]
        w, _ = lax.optimization_barrier((w, total[:1]))
        return total, compute(x, w * (1 + 0 * total[0]))[1]

    return {"reduce": reduce, "compute": compute, "both": both, "one behind other": behind}


def rank(given: Settings) -> None:
    """The program of a host."""
    with host.join() as here:
        _measure(given, here)


def _measure(given, here):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    there = NamedSharding(mesh, P("data"))

    def made(*shape):
        ones = np.full(shape, 1e-3, np.float32)
        return jax.make_array_from_process_local_data(there, ones)

    args = made(given.numbers), made(given.width, given.width)
    compiled = {}
    for name, function in programs(given).items():
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
        )
        compiled[name] = jax.jit(mapped).lower(*args).compile()
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for sample in range(given.samples + 1):
        for name, program in compiled.items():
            here.barrier()
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            if sample:
                seconds[name].append(time.perf_counter() - start)
    here.report(
        shaped=here.shaped,
        **{name: statistics.median(each) for name, each in seconds.items()},
    )


def main() -> int:
    given = Settings.parse()
    record = Recorder("schedule-cpu", given.command(), ("rate",))
    with network.hosts(2, given.rate) as made:
        rows = ranks.run("benchmarks.schedule.cpu", given, 2, made, 300)
    if not rows:
        return 1
    names = [name for name in rows[0][0] if name in programs(given)]
    slowest = {name: max(row[name] for row in rows[0]) for name in names}
    rate = given.rate if rows[0][0]["shaped"] else "unshaped"
    record.add(rate=rate, **slowest)
    columns = [Column(f"{name} ms", name, ".1f", 1e3) for name in names]
    table.show(record.rows, columns, f"on two hosts, {rate}, medians")
    say(f"written: {record.write()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
