"""The watchers' protocol: a hub on process 0, connected to a spoke on each other process.

Both ends of a connection send heartbeats every few seconds. Each watcher reports the end of
its process to the hub; if a whole host is lost, its connection closes or its heartbeats
stop. A lost process breaks collectives, so that other processes fail as well. So the hub
waits a moment, and then sends to all the likeliest cause: a loss before an error, an error
of a script before an abort, and an abort before an error of a collective.

The hub also counts the processes that have left their blocks. They wait until all have
left, at most `timeout` seconds after the first. A watcher cannot see whether a process
makes progress: one that waits in a collective may use a processor, and one that writes a
file may not.

This module imports Python's standard library alone, since watchers run without JAX
(`sidecar`).
"""

import contextlib
import enum
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sparsejax.jobs.texts import listed
from sparsejax.jobs.watch.connections import Line


SETTLE = 1.0  # seconds for which the hub collects further events before it decides
BEATS = 4  # heartbeats in the time after which their absence is a loss


class EventKind(enum.IntEnum):
    """The kinds of events that end a job, the likeliest cause first.

    ABORTED is less likely a cause than FAILED: C++ aborts a process for a fault of its own,
    but also if a collective has lost another process.
    """

    LOST = 0
    FAILED = 1
    ABORTED = 2
    LEFT = 3
    FOLLOWED = 4


class _Event(NamedTuple):
    kind: EventKind
    when: float
    text: str


class Watcher:
    """The base class of hubs and spokes.

    Attributes:
        why: The reason for which the job ends; "" as long as it runs.
    """

    def __init__(
        self,
        process: int,
        hosts: Mapping[int, str],
        timeout: float,
        end: Callable[[str], None],
        release: Callable[[], None],
    ):
        """Prepares to watch.

        Args:
            process: The index of the watched process.
            hosts: The host name of each process.
            timeout: Seconds without a heartbeat after which a process is lost, and for
                which processes may stay in their blocks after the first one has left.
            end: Called once with the reason for which the process is to end.
            release: Called once all processes have left their blocks.
        """
        self.why = ""
        self._process, self._hosts, self._timeout = process, hosts, timeout
        self._end, self._release = end, release
        self._lines: dict[int, Line] = {}
        self._listeners: list[threading.Thread] = []
        self._closed = threading.Event()
        self._told = threading.Event()
        self._events: list[_Event] = []
        self._lock = threading.Lock()
        # The seconds for which this watcher itself was stopped, and when it continued.
        self._stopped, self._woken = 0.0, -math.inf

    def start(self) -> None:
        """Starts the threads that send heartbeats and read from the connections."""
        self._start(self._beat)
        for line in self._lines.values():
            self._listeners.append(self._start(self._listen, line))

    def wait(self, seconds: float) -> str:
        """Waits at most `seconds` for the end of the job, and returns its reason, or ""."""
        self._told.wait(seconds)
        return self.why

    def named(self, process: int) -> str:
        """Returns the index and the host of a process as text."""
        return f"process {process} on host {self._hosts[process]}"

    def wait_for_ends(self, seconds: float) -> None:
        """Waits at most `seconds` until the other ends have closed, or are silent."""
        deadline = time.monotonic() + seconds
        for listener in self._listeners:
            listener.join(max(0.0, deadline - time.monotonic()))

    @property
    def is_over(self) -> bool:
        """Whether all processes have left their blocks; later ends are no losses."""
        return self._closed.is_set()

    def _start(self, target, *args):
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        return thread

    def _beat(self):
        pause = self._timeout / BEATS
        last = time.monotonic()
        while not self._closed.wait(pause):
            now = time.monotonic()
            if now - last > pause + self._timeout / 2:
                self._stopped, self._woken = now - last, now
            last = now
            for line in list(self._lines.values()):
                line.say(here=True)

    def _listen(self, line):
        try:
            for said in line.heard(self._timeout):
                if not self._take(line, said):
                    self._hear_out(line, said)
                    return
            line.close()
            event = "ended without a word: it was killed or aborted, or its memory was full"
        except TimeoutError:
            event = (
                f"has sent no heartbeat for {self._timeout:g} s: it was stopped, or its "
                "network is cut"
            )
        if not self._closed.is_set():
            self.happened(EventKind.LOST, f"{self.named(line.process)} {event}")

    def _hear_out(self, line, said):
        """Closes a connection; if the process failed, only after it has read the reason."""
        with contextlib.suppress(TimeoutError):
            while "happened" in said and line.read(self._timeout) is not None:
                pass
        line.close()

    def _take(self, line: Line, said: dict[str, Any]) -> bool:
        """Handles a line that was read, and returns whether to continue to read."""
        raise NotImplementedError

    def happened_here(self, kind: EventKind, text: str) -> None:
        """Reports an event of the watched process to the hub.

        Args:
            kind: The kind of the event.
            text: The predicate of a sentence about the process.
        """
        raise NotImplementedError

    def happened(self, kind: EventKind, text: str) -> None:
        """Records an event; the first one starts the thread that decides on the cause."""
        with self._lock:
            self._events.append(_Event(kind, time.monotonic(), text))
            is_first = len(self._events) == 1
        if is_first:
            self._start(self._judge)

    def _judge(self):
        time.sleep(self._settling())
        text = min(self._events).text
        if self._woken > min(event.when for event in self._events) - SETTLE:
            text = f"{self.named(self._process)} was stopped for {self._stopped:.3g} s"
        self._conclude(text)

    def _settling(self) -> float:
        """Returns the seconds for which further events are collected before a decision."""
        return 0.0

    def _conclude(self, why):
        with self._lock:
            if self.why or self._closed.is_set():
                return
            self.why = why
        self._tell(why)
        self._told.set()
        self._end(why)

    def _tell(self, why: str) -> None:
        """Sends the reason to the other watchers; a hub alone does."""

    def leave(self) -> None:
        """Records that the watched process has left its block."""
        raise NotImplementedError


class Hub(Watcher):
    """The watcher of process 0, with a connection to each of the others."""

    def __init__(self, lines: list[Line], hosts, timeout, end, release):
        super().__init__(0, hosts, timeout, end, release)
        self._lines = {line.process: line for line in lines}
        self._left: dict[int, str] = {}  # The time of leaving, by process, in that order.

    def _settling(self):
        return SETTLE

    def _take(self, line, said):
        if "happened" in said:
            text = f"{self.named(line.process)} {said['happened']}"
            self.happened(EventKind(said["kind"]), text)
        if "left" in said:
            self._leaves(line.process)
        return "happened" not in said

    def happened_here(self, kind: EventKind, text: str) -> None:
        """Records an event of process 0 among the others."""
        self.happened(kind, f"{self.named(0)} {text}")

    def _tell(self, why):
        for line in self._lines.values():
            line.say(why=why)

    def leave(self) -> None:
        """Records that process 0 has left its block."""
        self._leaves(0)

    def _leaves(self, process):
        """Releases all when the last process leaves; the first one starts the timeout."""
        with self._lock:
            self._left.setdefault(process, time.strftime("%H:%M:%S"))
            is_first = len(self._left) == 1
            if len(self._left) == len(self._hosts) and not self._events:
                self._closed.set()
        if self._closed.is_set():
            for line in self._lines.values():
                line.say(bye=True)
            self._release()
        elif is_first:
            self._start(self._wait_for_rest)

    def _wait_for_rest(self):
        if self._closed.wait(self._timeout):
            return
        with self._lock:
            (first, when), *_ = self._left.items()
            rest = [self.named(other) for other in self._hosts if other not in self._left]
        be = "is" if len(rest) == 1 else "are"
        self.happened(
            EventKind.LEFT,
            f"{self.named(first)} left its block at {when}, and {listed(rest)} {be} still "
            f"in it {self._timeout:g} s later: all processes must take the same number of "
            "steps and leave the block together. Let what one process does alone follow "
            "the block, or give watch_job a longer timeout",
        )


class Spoke(Watcher):
    """The watcher of a process other than 0, with a connection to the hub."""

    def __init__(self, line: Line, process: int, hosts, timeout, end, release):
        super().__init__(process, hosts, timeout, end, release)
        self._lines = {0: line}

    def _take(self, line, said):
        if "why" in said:
            self._conclude(str(said["why"]))
        if "bye" in said:
            self._closed.set()
            self._release()
        return not {"why", "bye"} & set(said)

    def happened_here(self, kind: EventKind, text: str) -> None:
        """Sends the event to the hub."""
        self._lines[0].say(happened=text, kind=kind)

    def leave(self) -> None:
        """Tells the hub that the process has left its block."""
        self._lines[0].say(left=True)


def tell(why: str) -> None:
    """Prints the reason for which a job ends, if stderr can be written to."""
    with contextlib.suppress(OSError, ValueError):  # a broken pipe, or a closed file
        print(
            f"\nsparsejax: {why}. The job ends on all hosts; start it again from its last "
            "checkpoint.",
            file=sys.stderr,
            flush=True,
        )
