"""The watched process's side of its watcher: starts the watcher, and sends it messages."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping

from sparsejax.jobs.watch.connections import Line
from sparsejax.jobs.watch.hub import BEATS, EventKind, tell


_TO_START = 60.0  # seconds to wait for a watcher to start, which slow disks delay
# Imports the modules of this folder without their packages' __init__, which import JAX.
_START = """
import sys, types
for at, name in enumerate(("sparsejax", "sparsejax.jobs", "sparsejax.jobs.watch"), 1):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [sys.argv[at]]
from sparsejax.jobs.watch import sidecar
sidecar.main()
"""


class WatcherProcess:
    """The watcher of this process, as this process sees it."""

    def __init__(
        self, lines: list[Line], process: int, hosts: Mapping[int, str], timeout: float
    ):
        """Starts the watcher.

        Args:
            lines: Connections to other watchers, which it takes over: on process 0 to all
                of them, on others to that of process 0.
            process: The index of this process.
            hosts: The host name of each process.
            timeout: Seconds without a heartbeat after which a process is lost.

        Raises:
            OSError: It cannot be started. The connections are left open.
        """
        own, other = socket.socketpair()
        given = {line.process: line.fileno() for line in lines}
        about = {
            "pid": os.getpid(),
            "process": process,
            "hosts": list(hosts.values()),
            "timeout": timeout,
            "own": other.fileno(),
            "lines": list(given.items()),
        }
        here = pathlib.Path(__file__).parent
        if not sys.executable:
            raise OSError("sys.executable names no Python")
        self._watcher = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", _START),
                *map(str, (here.parent.parent, here.parent, here)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[other.fileno(), *given.values()],
            start_new_session=True,  # so that it survives signals to this process's group
        )
        assert self._watcher.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._watcher.stdin as to:
            to.write(json.dumps(about).encode())
        other.close()
        self._line = Line(own, process)
        self._require_started()
        for line in lines:
            line.hand_over()
        self._all_left = threading.Event()
        self._pid = about["pid"]
        self._pause = timeout / BEATS
        threading.Thread(target=self._beat, daemon=True).start()

    def _require_started(self):
        there = None
        with contextlib.suppress(TimeoutError):
            there = self._line.read(_TO_START)
        if there is not None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._watcher.wait(1.0)
        self._watcher.kill()
        self._line.close()
        raise OSError(f"it ended with status {self._watcher.wait()}")

    @property
    def is_forked(self) -> bool:
        """Whether the caller is a forked child of the watched process."""
        return os.getpid() != self._pid

    def _beat(self):
        while not self._all_left.wait(self._pause):
            self._line.say(here=True)

    def is_to_end(self) -> bool:
        """Waits for the watcher: True if this process is to end, False if all have left."""
        said = self._line.read(None)
        if said is None:
            tell("the process that watches this one has ended")
        elif "bye" in said:
            self._all_left.set()
        return not self._all_left.is_set()

    def fail(self, text: str, follows: bool) -> None:
        """Reports that this process failed.

        Args:
            text: The predicate of a sentence about this process.
            follows: Whether it is an error of a collective that lost another process.
        """
        kind = EventKind.FOLLOWED if follows else EventKind.FAILED
        self._line.say(happened=text, kind=kind)

    def leave(self) -> None:
        """Reports that this process has left its block, and waits until all have left.

        The wait is bounded: if another process stays, the watcher ends this process.
        """
        self._line.say(left=True)
        self._all_left.wait()
        self._line.close()
        threading.Thread(target=self._watcher.wait, daemon=True).start()
