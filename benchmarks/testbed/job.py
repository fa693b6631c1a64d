"""Runs one process a host, watches them, and gathers what they report."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from benchmarks.testbed import host as host_side
from benchmarks.testbed.network import Network


# Large arrays are kept when they are freed. glibc gives each back to the kernel, and a step
# then waits for fresh pages: more than half of the processor's time, where 16 hosts share
# two virtual cores. Allocators that are usual in production keep them as well.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
}
# Seconds that the other ranks get to end once one has failed.
GRACE = 10.0
PORT = 47_311


@dataclasses.dataclass(frozen=True)
class Fault:
    """A process that is to be killed, or stopped for a while.

    Attributes:
        rank: Of which host.
        after: Seconds from the start of the job.
        pause: Seconds to stop it for; None kills it.
    """

    rank: int
    after: float
    pause: float | None = None

    @classmethod
    def parse(cls, text: str, pause: bool) -> "Fault":
        """From "3@20", or with a pause "3@20+5"."""
        form = r"(\d+)@(\d+(?:\.\d+)?)" + (r"\+(\d+(?:\.\d+)?)" if pause else "")
        match = re.fullmatch(form, text)
        if not match:
            wanted = "RANK@SECONDS+PAUSE, as 3@20+5" if pause else "RANK@SECONDS, as 3@20"
            raise ValueError(f"write it {wanted}; got {text!r}.")
        return cls(int(match[1]), float(match[2]), float(match[3]) if pause else None)


@dataclasses.dataclass
class Outcome:
    """The end of a job.

    Attributes:
        status: 0 if every process did well, else the first bad exit status, or 124 where
            the job ran out of time.
        rows: The rows that each rank reported.
        sent: Bytes that each host sent, headers taken off, if the network is shaped.
        seconds: From start to end.
        why: The error, in a line.
        codes: The exit status of each process; None of one that was still there when the
            others' time, or that of all, was over.
    """

    status: int
    rows: list[list[dict]]
    sent: list[float | None]
    seconds: float
    why: str = ""
    codes: tuple[int | None, ...] = ()


def run(
    command: list[str],
    ranks: int,
    network: Network | None,
    timeout: float,
    faults: tuple[Fault, ...] = (),
    environment: dict[str, str] | None = None,
    grace: float = GRACE,
) -> Outcome:
    """Runs the command once in each host, or over loopback if there is no network.

    Args:
        command: The program and its arguments.
        ranks: How many processes.
        network: Where; None for loopback.
        timeout: Seconds after which all is ended.
        faults: Faults to cause.
        environment: More variables for the processes.
        grace: Seconds that the other ranks get to end once one has failed.
    """
    for fault in faults:
        if fault.rank >= ranks:
            raise ValueError(f"there is no rank {fault.rank} among {ranks}.")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="testbed-"))
    job = _Job(command, ranks, network, faults, environment or {}, folder, grace)
    try:
        return job.run(timeout)
    finally:
        job.end()
        shutil.rmtree(folder, ignore_errors=True)


class _Job:
    def __init__(self, command, ranks, network, faults, environment, folder, grace):
        self.grace = grace
        self.command, self.ranks, self.network = command, ranks, network
        self.faults, self.folder = sorted(faults, key=lambda fault: fault.after), folder
        self.environment = environment
        self.processes: list[subprocess.Popen] = []
        self.killed: set[int] = set()
        self.streaming: threading.Thread | None = None
        self.sent: list[float | None] = [None] * ranks

    def run(self, timeout: float) -> Outcome:
        start = time.monotonic()
        coordinator = self._coordinator()
        for rank in range(self.ranks):
            self._start(rank, coordinator)
        self.streaming = threading.Thread(target=self._stream, daemon=True)
        self.streaming.start()
        status, why, failed_at = 0, "", None
        pending = list(self.faults)
        while True:
            elapsed = time.monotonic() - start
            while pending and elapsed >= pending[0].after:
                self._inflict(pending.pop(0))
            self._count()
            codes = [process.poll() for process in self.processes]
            if status == 0:
                status, why = self._failure(codes)
                failed_at = elapsed
            if all(code is not None for code in codes):
                break
            if elapsed > timeout:
                late = [rank for rank, code in enumerate(codes) if code is None]
                status, why = 124, f"ranks {late} still ran after {timeout:g} s"
                break
            if status and elapsed - failed_at > self.grace:
                break
            time.sleep(0.05)
        self.end()
        rows = [self._rows(rank) for rank in range(self.ranks)]
        seconds = time.monotonic() - start
        return Outcome(status, rows, self.sent, seconds, why, tuple(codes))

    def _coordinator(self) -> str:
        if self.network:
            return f"{self.network.hosts[0].address}:{PORT}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{probe.getsockname()[1]}"

    def _start(self, rank: int, coordinator: str) -> None:
        settings = {"RANK": rank, "RANKS": self.ranks, "COORDINATOR": coordinator}
        settings["REPORTS"] = self.folder / f"{rank}.jsonl"
        inside = []
        if self.network:
            host = self.network.hosts[rank]
            inside = ["ip", "netns", "exec", host.namespace]
            settings |= {"RATE": self.network.rate, "NAMESPACE": host.namespace}
            settings["SWITCH"] = self.network.switch
        # JAX's own settings from outside would meet those of the job.
        kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        named = {host_side.PREFIX + key: str(value) for key, value in settings.items()}
        output = subprocess.PIPE if rank == 0 else (self.folder / f"{rank}.txt").open("w")
        self.processes.append(
            subprocess.Popen(
                [*inside, *self.command],
                env=kept | ALLOCATOR | named | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
        if rank:
            output.close()

    def _stream(self) -> None:
        for line in self.processes[0].stdout:
            sys.stdout.write(line.decode(errors="replace"))
            sys.stdout.flush()

    def _inflict(self, fault: Fault) -> None:
        process = self.processes[fault.rank]
        if process.poll() is not None:
            return
        if fault.pause is None:
            self.killed.add(fault.rank)
            self._signal(process, signal.SIGKILL)
            return
        self._signal(process, signal.SIGSTOP)
        again = threading.Timer(fault.pause, self._signal, (process, signal.SIGCONT))
        again.daemon = True
        again.start()

    def _count(self) -> None:
        """Keeps the counters of each host while its process lives."""
        if not self.network:
            return
        for rank, process in enumerate(self.processes):
            try:
                _, self.sent[rank] = host_side.counters(f"/proc/{process.pid}/net/dev")
            except (OSError, LookupError):
                pass  # It has ended, or is not in its namespace yet.

    def _failure(self, codes) -> tuple[int, str]:
        for rank, code in enumerate(codes):
            if code and rank not in self.killed:
                tail = self._tail(rank)
                return abs(code), f"rank {rank} ended with status {code}{tail}"
        return 0, ""

    def _tail(self, rank: int, lines: int = 15) -> str:
        try:
            text = (self.folder / f"{rank}.txt").read_text(errors="replace")
        except OSError:
            return ""  # Rank 0 was streamed.
        return ":\n  " + "\n  ".join(text.strip().splitlines()[-lines:])

    def _rows(self, rank: int) -> list[dict]:
        try:
            lines = (self.folder / f"{rank}.jsonl").read_text().splitlines()
        except OSError:
            return []
        rows = []
        for line in lines:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break  # It was killed while writing.
        return rows

    def end(self) -> None:
        """Ends every process that still runs, and its children."""
        for process in self.processes:
            if process.poll() is None:
                self._signal(process, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        if self.streaming:
            self.streaming.join(timeout=5)
            self.processes[0].stdout.close()

    def _signal(self, process: subprocess.Popen, which: int) -> None:
        try:
            os.killpg(process.pid, which)
        except (ProcessLookupError, PermissionError):
            pass
