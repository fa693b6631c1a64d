"""How a process ended, as the system reports it to one that is not its parent."""

import fcntl
import os
import pathlib
import select
import signal
import struct
import threading

from sparsejax.jobs.watch.connections import Line
from sparsejax.jobs.watch.hub import EventKind


# Of Linux' pidfd.h: what is asked of a process, how long the answer is, and where in it the
# status is.
_INFO_EXIT, _INFO_BYTES, _INFO_STATUS = 1 << 3, 64, 60
_GET_INFO = (3 << 30) | (_INFO_BYTES << 16) | (0xFF << 8) | 11
_SIGNALS = {each.value for each in signal.Signals}


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

    def how(self) -> tuple[EventKind, str]:
        """What has happened to a process whose connection closed, and in words."""
        self._gone.wait(1.0)
        status = self._status()
        if status is None:
            return (
                EventKind.LOST,
                "ended without a word: it was killed or aborted, or its memory was full",
            )
        number = status & 0x7F
        if number == 0:
            return (
                EventKind.ABORTED,
                f"ended with status {status >> 8}, in the middle of the job",
            )
        name = signal.Signals(number).name if number in _SIGNALS else f"signal {number}"
        if number == signal.SIGKILL:
            return (
                EventKind.LOST,
                f"was killed ({name}): by somebody, or because memory was full",
            )
        if number == signal.SIGABRT:
            return EventKind.ABORTED, f"was aborted ({name}): what it printed last says why"
        return EventKind.LOST, f"was ended by {name}"

    def _status(self):
        """As `os.wait` tells it; None where that cannot be known.

        All systems tell until the parent of the process has read it, which a launcher that
        waits for it does first; Linux from 6.15 on tells after that, too.
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
