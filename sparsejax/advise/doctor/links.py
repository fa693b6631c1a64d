"""Measures latency and bandwidth between the ranks of a mesh.

On the wire, in turn and several times: each rank sends one word to the next, all gather
long arrays, and dense sums of arrays of this length. Latency is the time of a word.
Bandwidth is that of the gathers or of the sums, whichever is larger, without latencies. It
is not measured by a ring of sends, in which gloo uses one direction of a connection at a
time (`collectives.on_cpus`), so half of the bandwidth. It is the bandwidth that collectives
reach, with the copies that they make, and less than the nominal one of the link.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from sparsejax.axes import AxisName
from sparsejax.jobs import store
from sparsejax.placement import specs
from sparsejax.schemes.forecast import Network, agreeing
from sparsejax.wire.collectives import Wire


SHORT = 1  # float32 numbers of the short message
# The long message grows, from LONG numbers to at most LONGEST, until it takes ENOUGH
# seconds, so that constant costs are negligible.
LONG, LONGEST = 1 << 15, 1 << 24
ENOUGH = 0.04
# Consecutive messages in one program, since a single short one is lost in its overhead.
CHAIN = {"short": 32, "long": 2, "dense": 2}
ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class MessageTimes:
    """The times of one kind of message or sum, in seconds.

    Attributes:
        bytes: The size of the array of one rank.
        median: The median of all rounds.
        least: The shortest time of all rounds.
        most: The longest time of all rounds.
    """

    bytes: int
    median: float
    least: float
    most: float

    @classmethod
    def of(cls, size: int, seconds: Iterable[float]) -> "MessageTimes":
        """Summarizes the seconds of rounds, with arrays of `size` bytes."""
        each = list(seconds)
        return cls(size, statistics.median(each), min(each), max(each))

    @property
    def spread(self) -> float:
        """The ratio of the longest to the shortest time."""
        return self.most / max(self.least, 1e-12)


@dataclasses.dataclass(frozen=True)
class Links:
    """The measured network.

    Attributes:
        gbit_per_s: The bandwidth of a rank's link, in one direction.
        latency_us: The time of a message of one word.
        short: The times of a message of one word.
        long: The times of a gather of long arrays.
        dense: The times of a dense sum of arrays of this length.
        ranks: The number of ranks.
    """

    gbit_per_s: float
    latency_us: float
    short: MessageTimes
    long: MessageTimes
    dense: MessageTimes
    ranks: int

    @property
    def network(self) -> Network:
        """The network, as `explain` takes it."""
        return Network(self.gbit_per_s, self.latency_us)

    @property
    def dense_forecast(self) -> float:
        """The seconds of the dense sum that bandwidth and latency forecast."""
        sent = 2 * (self.ranks - 1) / self.ranks * self.long.bytes
        return 8e-9 * sent / self.gbit_per_s + 1e-6 * _waits(self.ranks) * self.latency_us


def measure(
    mesh: Mesh,
    axis_name: AxisName,
    progress: Callable[[str], None] = lambda line: None,
    *,
    rounds: int = ROUNDS,
    longest: int = LONGEST,
    timeout: float = 60.0,
) -> Links:
    """Times messages over an axis of the mesh; all processes of the job call it.

    Args:
        mesh: The mesh.
        axis_name: Its axis, of at least two ranks.
        progress: Called with a line of text before each longer task.
        rounds: How often each program is timed.
        longest: An upper bound of the numbers in a message.
        timeout: Seconds to wait for other processes, between programs.
    """
    ranks = specs.ranks_of(mesh, axis_name)
    program = lambda name, size: _MessageProgram(name, mesh, axis_name, size)
    size, long = LONG, program("long", LONG)
    while True:
        progress(f"sending arrays of {4 * size:,} bytes")
        long.seconds()  # The first call compiles, and opens connections.
        seconds = max(store.of_all("how long a message took", long.seconds(), timeout))
        if seconds > ENOUGH or 4 * size > longest:
            break
        size *= 4
        long = program("long", size)
    programs = [program("short", SHORT), long, program("dense", size)]
    for one in programs:
        one.seconds()
    own: dict[str, list[float]] = {one.name: [] for one in programs}
    for turn in range(rounds):
        progress(f"timing messages, round {turn + 1} of {rounds}")
        for k in range(len(programs)):
            one = programs[(turn + k) % len(programs)]
            own[one.name].append(one.seconds())
    # In each round, the time of the slowest process counts.
    answers = store.of_all("how long messages took", own, timeout)
    zeros = [[0.0] * rounds]  # `max` needs two arguments, also for one process
    short, long, dense = (
        MessageTimes.of(
            4 * one.size, map(max, *(each[one.name] for each in answers), *zeros)
        )
        for one in programs
    )
    rate = max(
        _bytes_per_second((ranks - 1) * long.bytes, ranks - 1, long, short),
        _bytes_per_second(
            2 * (ranks - 1) / ranks * dense.bytes, _waits(ranks), dense, short
        ),
    )
    return Links(
        gbit_per_s=8e-9 * rate,
        latency_us=1e6 * short.median,
        short=short,
        long=long,
        dense=dense,
        ranks=ranks,
    )


def _bytes_per_second(
    sent: float, waits: int, whole: MessageTimes, short: MessageTimes
) -> float:
    """Returns the bandwidth of a collective of `waits` consecutive messages."""
    # Subtract at most half, so that a latency that was measured too long does no harm.
    return sent / max(whole.median - waits * short.median, 0.5 * whole.median)


def _waits(ranks: int) -> int:
    """Returns the number of consecutive messages of a dense sum."""
    return 2 * agreeing(ranks)


class _MessageProgram:
    """A compiled program of consecutive messages, of `size` numbers of each rank."""

    def __init__(self, name, mesh, axis_name, size):
        self.name, self.size, wire = name, size, Wire(axis_name)
        sharding = NamedSharding(mesh, P(axis_name))
        piece = lambda index: np.zeros((1, size), np.float32)
        shape = specs.ranks_of(mesh, axis_name), size
        self._x = jax.make_array_from_callback(shape, sharding, piece)

        def on_rank(x):
            # Each message sends the result of the previous one.
            step = lambda _, x: _STEPS[name](wire, x) + jnp.float32(1)
            return lax.fori_loop(0, CHAIN[name], step, x)

        mapped = jax.shard_map(
            on_rank, mesh=mesh, in_specs=P(axis_name), out_specs=P(axis_name)
        )
        self._run = jax.jit(mapped)

    def seconds(self) -> float:
        """Runs the program, and returns the seconds of one message."""
        start = time.perf_counter()
        jax.block_until_ready(self._run(self._x))
        return (time.perf_counter() - start) / CHAIN[self.name]


def _send(wire, x):
    ahead = tuple((rank, (rank + 1) % wire.ranks) for rank in range(wire.ranks))
    return wire.permute(x, ahead)[0]


def _gather(wire, x):
    gathered, _ = wire.all_gather(x, same=False)
    return lax.dynamic_index_in_dim(gathered, (wire.rank + 1) % wire.ranks, keepdims=False)


def _sum(wire, x):
    return wire.per_rank(wire.psum(x)[0]) / wire.ranks


_STEPS = {"short": _send, "long": _gather, "dense": _sum}
