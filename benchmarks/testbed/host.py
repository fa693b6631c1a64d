"""A program's side of the testbed: it joins the job, and counts what its host sends.

    with host.join() as here:
        with here.section() as section:
            ...
        here.report(seconds=section.seconds, sent=section.sent)

Bytes are those of the link's counters less the headers of its packets, so that they can be
compared with a program's own count. Processor time is that of this process.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from benchmarks.testbed import network


# What Ethernet, IP and TCP with time stamps put before the data of a packet.
HEADERS = 14 + 20 + 32

PREFIX = "TESTBED_"


@dataclasses.dataclass
class Section:
    """The times and bytes of one host between two points.

    Attributes:
        seconds: By the clock.
        cpu: Seconds of processor time, of all threads.
        sent: Bytes that left the host, headers taken off; None where they are unknown.
        received: Bytes that came.
        begun: When it began, on the machine's clock, which all its processes read.
        ended: When it ended.
    """

    seconds: float = 0.0
    cpu: float = 0.0
    sent: float | None = None
    received: float | None = None
    begun: float = 0.0
    ended: float = 0.0
    _cpu: float = 0.0

    def begin(self) -> None:
        """Starts the clocks again; bytes are counted from the start of the section."""
        self._cpu, self.begun = _cpu(), time.monotonic()

    def end(self) -> None:
        """Stops the clocks."""
        self.ended = time.monotonic()
        self.seconds, self.cpu = self.ended - self.begun, _cpu() - self._cpu


def seconds_together(spans: Iterable[tuple[float, float]]) -> float:
    """From when the last of all hosts began to when the last ended.

    Not the longest time of any host: hosts begin one after another, and the first would be
    charged with having waited for the others.
    """
    begun, ended = zip(*spans, strict=True)
    return max(ended) - max(begun)


class Store(Protocol):
    """A store of values that the processes of a job share outside their collectives."""

    def set(self, key: str, value: str) -> None:
        """Keeps a value."""

    def wait(self, name: str, ranks: int) -> None:
        """Waits until so many processes wait here; a name serves once."""

    def values(self, folder: str, ranks: int) -> list[str]:
        """The values of folder/0, folder/1 and so on, all of which were set."""


@dataclasses.dataclass
class Here:
    """This process's host, and its place in the job."""

    rank: int
    ranks: int
    coordinator: str | None
    rate: str | None  # None: the network is not shaped
    namespace: str | None
    switch: str | None
    reports: pathlib.Path | None
    store: Store | None = None
    _met: int = 0

    @classmethod
    def from_environment(cls) -> "Here":
        """Reads the testbed's variables; without them, a job of one rank."""
        get = lambda name: os.environ.get(PREFIX + name) or None
        reports = get("REPORTS")
        return cls(
            rank=int(get("RANK") or 0),
            ranks=int(get("RANKS") or 1),
            coordinator=get("COORDINATOR"),
            rate=get("RATE"),
            namespace=get("NAMESPACE"),
            switch=get("SWITCH"),
            reports=pathlib.Path(reports) if reports else None,
        )

    @property
    def shaped(self) -> bool:
        """Whether the network has a rate."""
        return self.rate is not None

    def say(self, line: str = "") -> None:
        """Prints, on rank 0 alone."""
        if self.rank == 0:
            print(line, flush=True)

    def report(self, **row) -> None:
        """Hands a row to the process that started the job."""
        if self.reports is not None:
            with self.reports.open("a") as lines:
                lines.write(json.dumps(row) + "\n")

    def gather(self, value) -> list:
        """All ranks' values, which must be JSON, on every rank, without a collective."""
        if self.store is None:
            return [value]
        folder = f"testbed-{self._met + 1}"
        self.store.set(f"{folder}/{self.rank}", json.dumps(value))
        self.barrier()
        return [json.loads(text) for text in self.store.values(folder, self.ranks)]

    def barrier(self) -> None:
        """Waits until all ranks are here, without a collective."""
        if self.store is not None:
            self._met += 1
            self.store.wait(f"testbed-met-{self._met}", self.ranks)

    def set_rate(self, rate: str) -> None:
        """Changes the rate of the network; all ranks call it."""
        if not self.shaped:
            return
        network.limit(self.namespace, "eth0", rate)
        network.limit(self.switch, f"port{self.rank}", rate)
        self.rate = rate
        self.barrier()

    @contextlib.contextmanager
    def section(self) -> Iterator[Section]:
        """Measures its block; all ranks enter together.

        Bytes are counted when all have left: what a rank has sent may wait in its queue.
        """
        self.barrier()
        section, before = Section(), self._counters()
        section.begin()
        yield section
        section.end()
        if before is not None:
            self.barrier()
            counts = zip(before, self._counters(), strict=True)
            section.received, section.sent = (new - old for old, new in counts)

    def _counters(self) -> tuple[float, float] | None:
        """Bytes received and sent so far, less their packets' headers."""
        if not self.shaped:
            return None
        return counters("/proc/net/dev")


def counters(path: str) -> tuple[float, float]:
    """Bytes received and sent by eth0 without headers, from a /proc/.../net/dev."""
    for line in pathlib.Path(path).read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            fields = [int(field) for field in numbers.split()]
            return fields[0] - HEADERS * fields[1], fields[8] - HEADERS * fields[9]
    raise LookupError(f"there is no eth0 in {path}")


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class _Coordinator:
    """JAX's coordination service as a store."""

    def __init__(self, client):
        self._client = client

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value)

    def wait(self, name: str, ranks: int) -> None:
        self._client.wait_at_barrier(name, 600_000)

    def values(self, folder: str, ranks: int) -> list[str]:
        values = dict(self._client.key_value_dir_get(folder))
        return [values[f"{folder}/{rank}"] for rank in range(ranks)]


def share_compiled() -> None:
    """Lets rank 0 compile for all: with the hosts on one machine, a sixteenth of the work.

    JAX does this by itself where the key of a program is the same on all ranks. On CPUs it
    is not, for it holds a fingerprint of the devices, which differs by process; all hosts
    here are one machine, so it says nothing. Call it behind `join`.
    """
    import jax
    from jax._src import cache_key

    cache_key._hash_accelerator_config = lambda digest, *_: digest.update(b"one machine")
    jax.config.update("jax_share_binary_between_hosts", True)
    jax.config.update("jax_share_binary_between_hosts_timeout_ms", 600_000)


@contextlib.contextmanager
def ending(leave: Callable[[], None]) -> Iterator[None]:
    """Ends the process at once if its block fails, and calls `leave` if it does not.

    Saying good-bye would wait for the other ranks, and they may wait for this one.
    """
    try:
        yield
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    leave()


@contextlib.contextmanager
def join(devices: int = 1) -> Iterator[Here]:
    """Joins the `jax.distributed` job that the testbed started.

    Args:
        devices: How many simulated ones this host has.
    """
    import jax
    from jax._src import distributed

    here = Here.from_environment()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    if here.ranks == 1:
        yield here
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        here.coordinator,
        here.ranks,
        here.rank,
        initialization_timeout=120,
        heartbeat_timeout_seconds=120,
    )
    here.store = _Coordinator(distributed.global_state.client)
    with ending(jax.distributed.shutdown):
        yield here
