"""The watcher of a process, as that process sees it: it starts it, and speaks to it."""

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


_TO_START = 60.0  # seconds, at most, in which a watcher starts, from slow disks, too
# The modules above, by their names, without the packages around them, which import JAX.
_START = """
import sys, types
for name, folder in (("sparsejax", 1), ("sparsejax.wire", 2), ("sparsejax.jobs", 3)):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [sys.argv[folder]]
from sparsejax.jobs.watch.context import sidecar
sidecar.main()
"""


class WatcherProcess:
    """The watcher of this process, as this process sees it."""

    def __init__(
        self, lines: list[Line], process: int, hosts: Mapping[int, str], timeout: float
    ):
        """Starts it.

        Args:
            lines: Connections to the other watchers, which it takes over: to all of them on
                process 0, to process 0 on the others.
            process: The number of this process.
            hosts: The host of each process.
            timeout: Seconds of silence that are a loss.

        Raises:
            OSError: It cannot be started. The lines are left as they are.
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
            start_new_session=True,  # so that what is sent to this one's group is seen
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
        """Whether this is a child of the process that is watched, which is not."""
        return os.getpid() != self._pid

    def _beat(self):
        while not self._all_left.wait(self._pause):
            self._line.say(here=True)

    def is_to_end(self) -> bool:
        """Waits until this process is to end, or, with False, until all have left."""
        said = self._line.read(None)
        if said is None:
            tell("the process that watches this one has ended")
        elif "bye" in said:
            self._all_left.set()
        return not self._all_left.is_set()

    def fail(self, text: str, follows: bool) -> None:
        """Says that this process failed.

        Args:
            text: What a sentence says of it.
            follows: Whether that is an error of a collective which lost another process.
        """
        kind = EventKind.FOLLOWED if follows else EventKind.FAILED
        self._line.say(happened=text, kind=kind)

    def leave(self) -> None:
        """Says that this process has left its block, and waits until all have left theirs.

        Its watcher ends that: it ends this process where another one stays.
        """
        self._line.say(left=True)
        self._all_left.wait()
        self._line.close()
        threading.Thread(target=self._watcher.wait, daemon=True).start()
