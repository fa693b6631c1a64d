"""The watcher of each process of a job, a process of its own that reports how it ended.

If a process loses another one in the middle of a collective, C++ code of gloo, NCCL or
JAX's coordination service may abort it before Python can report anything; and a process
that is killed reports nothing. So its watcher is a small process of about 15 MB, which
imports neither JAX nor NumPy, runs in its own session, and has the connection to the other
watchers. The watched process sends it heartbeats over a pair of sockets. When it ends, the
kernel closes its socket, and usually gives its exit status or signal.

When the job ends, each watcher prints the reason, whether or not its process is alive, and
then ensures that the process ends: it kills one that is stopped, or whose Python does not
run.
"""

import json
import os
import signal
import socket
import sys
import threading

from sparsejax.jobs.watch.connections import Line
from sparsejax.jobs.watch.ending import Process
from sparsejax.jobs.watch.hub import SETTLE, EventKind, Hub, Spoke, tell


_TO_READ = 3.0  # seconds, at most, that process 0 waits until the others have ended
_TO_END = 5.0  # seconds, at most, in which a notified process ends by itself
# Signals that schedulers send to all processes of a job before they kill it. The watcher
# ignores them, since its process may first save a state; it ends after the process.
_NOT_FOR_IT = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


class Sidecar:
    """A watcher, in its own process."""

    def __init__(self, watched: Process, about: dict):
        """Prepares to watch; `about` is the JSON that `WatcherProcess` sends."""
        self._watched, self._timeout = watched, about["timeout"]
        hosts, process = dict(enumerate(about["hosts"])), about["process"]
        lines = [Line(socket.socket(fileno=fd), other) for other, fd in about["lines"]]
        self._patience = _TO_END
        self._ended = threading.Event()
        common = hosts, self._timeout, self._end, self._release
        if process == 0:
            self.watcher = Hub(lines, *common)
        else:
            self.watcher = Spoke(lines[0], process, *common)

    def _end(self, why):
        # In a thread, because printing blocks if nothing reads a pipe that is full.
        telling = threading.Thread(target=tell, args=(why,), daemon=True)
        telling.start()
        telling.join(_TO_READ)
        if isinstance(self.watcher, Hub):
            # The coordinator ends with process 0, and JAX then aborts the others.
            self.watcher.wait_for_ends(_TO_READ)
        self._watched.line.say(why=why)
        self._watched.end(self._patience)
        self._ended.set()

    def _release(self):
        self._watched.line.say(bye=True)

    def watch(self) -> None:
        """Watches until all processes have left their blocks, or this one has ended."""
        self.watcher.start()
        is_silent = self._is_silent()
        if self.watcher.is_over:
            # A connection closed too early may lose the message that all have left.
            self.watcher.wait_for_ends(self._timeout)
            return
        if is_silent:
            self._patience = 0.0
            self.watcher.happened_here(
                EventKind.LOST,
                f"has stood still for {self._timeout:g} s: it was stopped, or something in "
                "it kept Python from running",
            )
        else:
            self._watched.closed()
            self.watcher.happened_here(*self._watched.how())
        self._ended.wait(2 * SETTLE + self._timeout + _TO_READ + _TO_END)

    def _is_silent(self):
        """Reads from the process until it closes its socket; True if heartbeats stop."""
        try:
            for said in self._watched.line.heard(self._timeout):
                if "left" in said:
                    self.watcher.leave()
                if "happened" in said:
                    self.watcher.happened_here(said["kind"], said["happened"])
        except TimeoutError:
            return True
        return False


def main() -> None:
    """Watches the process that started this one."""
    for each in _NOT_FOR_IT:
        signal.signal(each, signal.SIG_IGN)
    about = json.load(sys.stdin)
    line = Line(socket.socket(fileno=about["own"]), about["process"])
    line.say(here=True)
    Sidecar(Process(about["pid"], line), about).watch()
    os._exit(0)  # A normal exit would wait for output that is still being printed.
