"""The companion of each process of a job, which watches it and reports how it ended.

A process that loses another one in the middle of a collective may be ended in C++, by gloo,
NCCL or JAX's coordination service, before Python comes to say anything; and one that is
killed says nothing at all. So the watcher of a process is a small one of its own, of some
15 MB, which imports neither JAX nor NumPy and has a session of its own. It holds the
connection to the other watchers. From the process it hears every few seconds, over a pair
of sockets; when that ends, the kernel says so, and as a rule by which signal.

A watcher prints the sentence for which the job ends, whether or not its process is still
there to do so, and then sees that the process does end: one that is stopped, or whose
Python never comes to run, it kills.
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


_TO_READ = 3.0  # seconds, at most, for which process 0 stays until the others have ended
_TO_END = 5.0  # seconds, at most, in which a notified process ends by itself
# What schedulers send to all that runs of a job, before they kill it: the process may have
# to save something, and its watcher ends when that has ended.
_NOT_FOR_IT = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


class Side:
    """A watcher, in its own process."""

    def __init__(self, watched: Process, about: dict):
        """Prepares to watch; `about` is what `WatcherProcess` says."""
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
        # Where nobody reads what is printed, that may wait for ever.
        telling = threading.Thread(target=tell, args=(why,), daemon=True)
        telling.start()
        telling.join(_TO_READ)
        if isinstance(self.watcher, Hub):
            # With process 0 the coordinator ends, and JAX then aborts the others.
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
            # Closed before the others have read that all have left, a line may lose that.
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
        """Hears the process until it closes its line, or is silent."""
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
    Side(Process(about["pid"], line), about).watch()
    os._exit(0)  # Python's way out would wait for what is still being printed.
