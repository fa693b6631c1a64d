"""Finds out how a process ended, from a process that is not its parent."""

import fcntl
import os
import pathlib
import select
import signal
import struct
import threading

from sparsejax.jobs.watch.connections import Line
from sparsejax.jobs.watch.hub import EventKind


# From Linux' pidfd.h: the flag that asks for the exit status, the bytes of the answer, and
# the offset of the status in it.
_INFO_EXIT, _INFO_BYTES, _INFO_STATUS = 1 << 3, 64, 60
_GET_INFO = (3 << 30) | (_INFO_BYTES << 16) | (0xFF << 8) | 11
_SIGNALS = {each.value for each in signal.Signals}


class Process:
    """The watched process, as its watcher sees it."""

    def __init__(self, pid: int, line: Line):
        """Prepares to watch.

        Args:
            pid: The id of the process, which is the parent of this one.
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
        """Waits until the process ends, by a pidfd, and then closes the connection.

        Without pidfds the end is noticed by the connection, which the kernel closes; but it
        stays open as long as the process has forked children that are alive.
        """
        try:
            self._pidfd = os.pidfd_open(self._pid)
            select.select([self._pidfd], [], [])
        except OSError:  # Some sandboxes do not implement pidfds.
            self._seen = False
            return
        self._gone.set()
        self.line.close()

    def closed(self) -> None:
        """Notes that the connection has closed."""
        if not self._seen:
            self._gone.set()

    def how(self) -> tuple[EventKind, str]:
        """Returns how the process ended whose connection has closed, also in words."""
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
                f"was killed ({name}): by an operator or a scheduler, or by the "
                "out-of-memory killer",
            )
        if number == signal.SIGABRT:
            return (
                EventKind.ABORTED,
                f"was aborted ({name}), often because processes made different calls or "
                "gave batches of different shapes: what it printed last says why",
            )
        return EventKind.LOST, f"was ended by {name}"

    def _status(self):
        """Returns the exit status in the format of `os.wait`; None if it is unknown.

        Linux shows it until the parent of the process has read it, and a launcher that
        waits for the process may read it first. From 6.15 on Linux keeps it for pidfds.
        """
        try:
            text = pathlib.Path(f"/proc/{self._pid}/stat").read_text()
        except OSError:
            return self._status_by_pidfd()
        fields = text.rpartition(")")[2].split()
        return int(fields[-1]) if fields[0] == "Z" else self._status_by_pidfd()

    def _status_by_pidfd(self):
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
