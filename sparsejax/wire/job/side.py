"""The process beside each process of a job that watches it, and tells how it ended.

A process that loses another one in the middle of a collective may be ended in C++, by gloo,
NCCL or JAX's coordination service, before Python comes to say anything; and one that is
killed says nothing at all. So the watcher of a process is a small one of its own, of some
10 MB, which imports neither JAX nor NumPy and has a session of its own. It holds the
connection to the other watchers. From the process it hears every few seconds, over a pair
of sockets; when that ends, the kernel says so, and as a rule by which signal.

A watcher prints the sentence for which the job ends, whether or not its process is still
there to do so, and then sees that the process does end: one that is stopped, or whose
Python never comes to run, it kills.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping

from sparsejax.wire.job.lines import Line
from sparsejax.wire.job.watchers import BEATS, SETTLE, Hub, Kind, Spoke


_TO_START = 60.0  # seconds, at most, in which a watcher starts, from slow disks, too
_TO_READ = 3.0  # seconds, at most, for which process 0 stays until the others have ended
_TO_END = 5.0  # seconds, at most, in which a process that was told ends by itself
# What schedulers send to all that runs of a job, before they kill it: the process may have
# to save something, and its watcher ends when that has ended.
_NOT_FOR_IT = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
# Of Linux' pidfd.h: what is asked of a process, how long the answer is, and where in it the
# status is.
_INFO_EXIT, _INFO_BYTES, _INFO_STATUS = 1 << 3, 64, 60
_GET_INFO = (3 << 30) | (_INFO_BYTES << 16) | (0xFF << 8) | 11
# The modules above, by their names, without the packages around them, which import JAX.
_START = """
import sys, types
for name, folder in (("sparsejax", 1), ("sparsejax.wire", 2), ("sparsejax.wire.job", 3)):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [sys.argv[folder]]
from sparsejax.wire.job import side
side.main()
"""


class Beside:
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
        job = pathlib.Path(__file__).parent
        if not sys.executable:
            raise OSError("sys.executable names no Python")
        self._watcher = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", _START),
                *map(str, (job.parent.parent, job.parent, job)),
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
        self._done, self._heard = threading.Event(), threading.Event()
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
        while not self._done.wait(self._pause):
            self._line.say(here=True)

    def is_to_end(self) -> bool:
        """Waits until all are told why this process is to end; False once it has left."""
        said = self._line.read(None)
        if said is None and not self._done.is_set():
            tell("the process that watches this one has ended")
        self._heard.set()
        return not self._done.is_set()

    def fail(self, text: str, follows: bool) -> None:
        """Says that this process failed.

        Args:
            text: Of the error.
            follows: Whether that is one of a collective which lost another process.
        """
        kind = Kind.FOLLOWED if follows else Kind.FAILED
        self._line.say(happened=f"failed: {text}", kind=kind)

    def leave(self) -> None:
        """Says that this process is done, and waits until its watcher has heard it.

        That of process 0 goes on until the others are done, which may be later.
        """
        self._done.set()
        self._line.say(done=True)
        self._heard.wait(2 * _TO_READ)
        self._line.close()
        threading.Thread(target=self._watcher.wait, daemon=True).start()


class Process:
    """A process that is watched, as its watcher sees it."""

    def __init__(self, pid: int, line: Line):
        """Prepares to watch.

        Args:
            pid: Of the process, which is the parent of this one.
            line: A connection to it.
        """
        self.line = line
        self._pid = pid
        self._gone = threading.Event()
        self._seen = hasattr(os, "pidfd_open")
        self._pidfd = -1
        if self._seen:
            threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self):
        """Closes the connection when the process ends.

        Where that cannot be seen, the connection itself tells of the end; it stays open
        where the process leaves children that were forked.
        """
        try:
            self._pidfd = os.pidfd_open(self._pid)
            select.select([self._pidfd], [], [])
        except OSError:  # Some sandboxes have none.
            self._seen = False
            return
        self._gone.set()
        self.line.close()

    def closed(self) -> None:
        """Called when the connection has closed."""
        if not self._seen:
            self._gone.set()

    def how(self) -> tuple[Kind, str]:
        """What has happened to a process whose connection closed, and in words."""
        self._gone.wait(1.0)
        status = self._status()
        if status is None:
            return Kind.LOST, "ended without a word: it was killed, or its memory was full"
        number = status & 0x7F
        if number == 0:
            return (
                Kind.ABORTED,
                f"ended with status {status >> 8}, in the middle of the job",
            )
        name = signal.Signals(number).name if number in _SIGNALS else f"signal {number}"
        if number == signal.SIGKILL:
            return (
                Kind.LOST,
                f"was killed ({name}): by somebody, or because memory was full",
            )
        if number == signal.SIGABRT:
            return Kind.ABORTED, f"was aborted ({name}): what it printed last says why"
        return Kind.LOST, f"was ended by {name}"

    def _status(self):
        """As `os.wait` tells it; None where that cannot be known.

        All systems tell until the parent of the process has read it, which a launcher that
        waits for it does first; Linux from 6.15 on tells behind that, too.
        """
        try:
            text = pathlib.Path(f"/proc/{self._pid}/stat").read_text()
        except OSError:
            return self._status_behind()
        fields = text.rpartition(")")[2].split()
        return int(fields[-1]) if fields[0] == "Z" else self._status_behind()

    def _status_behind(self):
        about = bytearray(_INFO_BYTES)
        struct.pack_into("Q", about, 0, _INFO_EXIT)
        try:
            fcntl.ioctl(self._pidfd, _GET_INFO, about)
        except (OSError, ValueError):
            return None
        (has,) = struct.unpack_from("Q", about)
        return struct.unpack_from("i", about, _INFO_STATUS)[0] if has & _INFO_EXIT else None

    def end(self, patience: float) -> None:
        """Waits until the process has ended, and kills it if that takes longer."""
        if not self._gone.wait(patience) and os.getppid() == self._pid:
            os.kill(self._pid, signal.SIGKILL)


_SIGNALS = {each.value for each in signal.Signals}


class Side:
    """A watcher, in its own process."""

    def __init__(self, watched: Process, about: dict):
        """Prepares to watch; `about` is what `Beside` says."""
        self._watched, self._timeout = watched, about["timeout"]
        hosts, process = dict(enumerate(about["hosts"])), about["process"]
        lines = [Line(socket.socket(fileno=fd), other) for other, fd in about["lines"]]
        self._patience = _TO_END
        self._ended = threading.Event()
        self._is_done = False
        if process == 0:
            self.watcher = Hub(lines, hosts, self._timeout, self._end)
        else:
            self.watcher = Spoke(lines[0], process, hosts, self._timeout, self._end)

    def _end(self, why):
        # Where nobody reads what is printed, that may wait for ever.
        telling = threading.Thread(target=tell, args=(why,), daemon=True)
        telling.start()
        telling.join(_TO_READ)
        if isinstance(self.watcher, Hub):
            # With process 0 the coordinator ends, and JAX then aborts the others.
            self.watcher.wait_for_ends(_TO_READ)
        if not self._is_done:
            self._watched.line.say(why=why)
            self._watched.end(self._patience)
        self._ended.set()

    def _leave(self):
        """Leaves in peace; that of process 0 when the others have left, or are lost."""
        self._is_done = True
        if isinstance(self.watcher, Hub):
            self._watched.line.say(bye=True)
            self.watcher.wait_for_ends(None)
            if self.watcher.is_judging:
                self._ended.wait(2 * SETTLE + 2 * _TO_READ)
        self.watcher.leave()
        self.watcher.wait_for_ends(_TO_READ)

    def watch(self) -> None:
        """Watches until the process is done, or has ended."""
        self.watcher.start()
        try:
            for said in self._watched.line.heard(self._timeout):
                if "done" in said:
                    self._leave()
                    return
                if "happened" in said:
                    self.watcher.happened_here(said["kind"], said["happened"])
            self._watched.closed()
            self.watcher.happened_here(*self._watched.how())
        except TimeoutError:
            self._patience = 0.0
            self.watcher.happened_here(
                Kind.LOST,
                f"has stood still for {self._timeout:g} s: it was stopped, or something in "
                "it kept Python from running",
            )
        self._ended.wait(2 * SETTLE + self._timeout + _TO_READ + _TO_END)


def tell(why: str) -> None:
    """Prints the sentence for which a job ends, if that can be printed."""
    with contextlib.suppress(OSError, ValueError):  # a pipe that is broken, or closed
        print(
            f"\nsparsejax: {why}. The job ends on all hosts; start it again from its last "
            "checkpoint.",
            file=sys.stderr,
            flush=True,
        )


def main() -> None:
    """Watches the process that started this one."""
    for each in _NOT_FOR_IT:
        signal.signal(each, signal.SIG_IGN)
    about = json.load(sys.stdin)
    line = Line(socket.socket(fileno=about["own"]), about["process"])
    line.say(here=True)
    Side(Process(about["pid"], line), about).watch()
    os._exit(0)  # Python's way out would wait for what is still being printed.
