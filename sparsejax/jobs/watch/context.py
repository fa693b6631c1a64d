"""Ends all processes of a job if one is lost, or leaves too early, and names that process.

A collective waits for every process. If one has died, or its host is cut off, the others
wait for minutes until JAX's coordination service gives up, or fail with an error of a
connection that does not name the process. So each process has a watcher (`sidecar`), a
small process with its own connection to the watcher of process 0, independent of JAX and
its devices, over which both send heartbeats every few seconds (about twenty bytes). `hub`
decides what is reported. In this module a process connects, starts its watcher, and ends
when the watcher tells it to: from a thread, since the main one may wait in a collective
that never completes.
"""

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any

import jax

from sparsejax import arguments
from sparsejax.errors import JobError
from sparsejax.jobs import store
from sparsejax.jobs.texts import listed
from sparsejax.jobs.watch.client import WatcherProcess
from sparsejax.jobs.watch.connections import Line, listening
from sparsejax.jobs.watch.hub import SETTLE, EventKind


def watch_job(timeout: float = 60.0, *, port: int = 0) -> "Watch":
    """Ends the job on all hosts if a process is lost while the context is active.

    A process is lost if it ends, or if it sends no heartbeat for `timeout` seconds, because
    it was stopped or its network is down. If the block raises in a process, the others end
    with the text of that error; `sys.exit()` with any status is such an error. Every host
    then prints one sentence that names the process and its host, and every process ends
    with status 1, without Python's cleanup, since it may wait in a collective. A small
    process (15 MB, without JAX) watches each process. It prints the sentence even if JAX or
    the library of a collective aborts the process first. In a job of one process nothing is
    watched.

    All processes leave the block together: the first at its end waits for the others. If
    one is still inside after `timeout` seconds, the job ends, and both are named, because a
    process that computes cannot be distinguished from one that waits in a collective. So
    all processes must take the same number of steps, and a longer task of one process alone
    must follow the block. Steps continue after the call that dispatches them has returned:
    wait for the last one in the block, by `jax.block_until_ready(state)`.

    SIGTERM ends nothing: JAX records it (`docs/several_hosts.md`, *SIGTERM*). Call
    `watch_job` on all processes, after `jax.distributed.initialize`.

    Args:
        timeout: Seconds without a heartbeat after which a process is lost, and for which a
            process may stay in the block after another one has left it. It must be longer
            than any pause of a healthy process, such as that of a virtual machine.
        port: The port of process 0; a free one if 0.

    Returns:
        A context manager.

    Raises:
        JobError: When the block begins, if a process cannot reach process 0, or cannot
            start its watcher.

    Example:
        >>> trainer = sparsejax.data_parallel(loss_fn, tx, mesh)
        >>> with sparsejax.advise.watch_job(timeout=60.0):
        ...     state = trainer.init(params)  # and all its steps

    See Also:
        `sparsejax.check_job`: compares the processes at the start.
        `sparsejax.advise.check_coordinator`: checks that all processes are there, before
        JAX joins the job.
    """
    arguments.check_positive("timeout", timeout)
    arguments.check_whole("port", port, 0)
    return Watch(timeout, port)


class Watch:
    """The context manager of `watch_job`."""

    def __init__(self, timeout: float, port: int):
        self._timeout, self._port = timeout, port
        self._watcher: WatcherProcess | None = None

    def __enter__(self) -> "Watch":
        here = store.place()
        if here.processes == 1:
            return self
        server = None
        own: dict[str, Any] = {"host": socket.gethostname()}
        if here.process == 0:
            try:
                server = listening(self._port)
                own["port"] = server.getsockname()[1]
            except OSError as error:
                own["why"] = f"cannot listen at port {self._port}: {error.strerror}"
        answers = store.of_all("where watch_job listens", own, self._timeout)
        hosts = dict(enumerate(one["host"] for one in answers))
        if "why" in answers[0]:
            raise JobError(
                f"watch_job: process 0 on host {hosts[0]} {answers[0]['why']}. Name a port "
                "that is free there, or none."
            )
        if server is not None:
            with server:
                lines = self._called(server, hosts)
        else:
            lines = [self._connected(here, hosts, answers[0]["port"])]
        try:
            self._watcher = WatcherProcess(lines, here.process, hosts, self._timeout)
        except OSError as error:
            why = f"cannot start its watcher by {sys.executable!r}: {error}"
            who = f"process {here.process} on host {hosts[here.process]}"
            for line in lines:
                line.say(happened=why, kind=EventKind.FAILED, why=f"{who} {why}")
                line.close()
            raise JobError(
                f"watch_job: {who} {why}. Let sys.executable name a Python that starts "
                "there, or train without watch_job."
            ) from error
        threading.Thread(target=self._wait, daemon=True).start()
        atexit.register(self._fail, "ended its script inside its block")
        return self

    def _called(self, server, hosts):
        """Accepts the connections of all other processes, on process 0."""
        lines: list[Line] = []
        deadline = time.monotonic() + self._timeout
        while len(lines) < len(hosts) - 1:
            try:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                line = Line(server.accept()[0], -1)
                said = line.read(max(0.01, min(2.0, deadline - time.monotonic()))) or {}
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue  # A connection that sends nothing.
                missing = set(hosts) - {0} - {line.process for line in lines}
                names = [f"process {p} on host {hosts[p]}" for p in sorted(missing)]
                why = f"watch_job: {listed(names)} cannot reach process 0 on {hosts[0]}"
                for line in lines:
                    line.say(why=why)
                    line.close()
                raise JobError(
                    f"{why}: open the port of watch_job(port=...) there."
                ) from None
            except OSError as error:
                why = (
                    f"watch_job: process 0 on host {hosts[0]} cannot take {len(hosts) - 1} "
                    f"connections, one from each other process ({error.strerror}): raise "
                    "its limit of open files there (ulimit -n)."
                )
                for line in lines:
                    line.say(why=why)
                    line.close()
                raise JobError(why) from error
            process = said.get("process", -1)
            known = isinstance(process, int) and process in hosts
            if known and process not in {0, *(one.process for one in lines)}:
                line.process = process
                lines.append(line)
        for line in lines:
            line.say(here=True)
        return lines

    def _connected(self, here, hosts, port):
        """Connects to process 0, and waits until all others have connected, too."""
        address = (here.coordinator or "").rpartition(":")[0].strip("[]")
        try:
            connection = socket.create_connection((address, port), self._timeout)
        except OSError as error:
            raise JobError(
                f"watch_job: process {here.process} on host {hosts[here.process]} cannot "
                f"reach process 0 at {address}:{port} ({error}): open that port there, or "
                "name one that is open, watch_job(port=...)."
            ) from None
        line = Line(connection, 0)
        line.say(process=here.process)
        try:
            said = line.read(2 * self._timeout)
        except TimeoutError:
            said = None
        if said is None or "why" in said:
            raise JobError((said or {}).get("why", "watch_job: process 0 has ended."))
        return line

    def __exit__(self, kind, error, _) -> None:
        if self._watcher is None or self._watcher.is_forked:
            return
        try:
            if error is None:
                self._watcher.leave()
        except BaseException as raised:  # such as Ctrl-C, while it waits for the others
            error = raised
        if error is None:
            atexit.unregister(self._fail)
            return
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        self._fail(_text(error), _follows(error))

    def _fail(self, text, follows=False):
        """Reports a failure of this process to all, which ends this process, too."""
        assert self._watcher is not None
        if self._watcher.is_forked:
            return
        self._watcher.fail(text, follows)
        # The other thread ends this process once all are notified; this is a last resort.
        time.sleep(3 * SETTLE + 2 * self._timeout)
        self._end()

    def _wait(self):
        assert self._watcher is not None
        if self._watcher.is_to_end():
            self._end()

    def _end(self) -> None:
        """Ends this process at once: Python's and JAX's cleanup would wait for others."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()  # It may be None, closed, or a broken pipe.
        os._exit(1)


def _text(error: BaseException) -> str:
    """Returns the predicate of a sentence about a process whose block raised this."""
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        status = "" if error.code is None else error.code
        fix = "" if error.code else ", which all processes must leave first"
        return f"called sys.exit({status}) inside its block{fix}"
    is_exit = isinstance(error, SystemExit)
    name, own = type(error).__name__, str(error.code if is_exit else error).strip()
    line, _, rest = own.partition("\n")
    if line.endswith("Traceback (most recent call last):"):
        # JAX's error of a callback: its traceback as text, whose last line is the cause.
        lines = rest.partition("\n-----")[0].strip().splitlines()
        line = lines[-1].strip() if lines else line
    text = line if is_exit or not line else f"{name}: {line}"
    return f"failed: {text[:400].removesuffix('.') or name}"


def _follows(error: BaseException | None) -> bool:
    """Whether an error probably comes from a collective that lost another process.

    Its causes count, too: a checkpoint that could not be written may be a consequence.
    """
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return "RESOURCE_EXHAUSTED" not in str(error)
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
