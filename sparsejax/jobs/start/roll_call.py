"""Finds out which processes of a job are present, before JAX joins the job.

If a process is missing, `jax.distributed.initialize` ends the others after its timeout, and
does not name the missing one. Here each process connects to process 0, at the port on which
JAX will listen, sends its index and its host, and receives whether every process came once.
It also sends the indices that launchers gave it, so that an error about two processes of
one index can name the environment variable.
"""

import json
import socket
import time
from collections import Counter
from typing import Any, NamedTuple

from sparsejax.errors import JobError
from sparsejax.jobs.start import facts


_LONGEST = 1 << 12  # bytes of a message
_MORE = 10.0  # seconds that other processes wait longer than process 0
_SETTLE = 0.3  # seconds, once all are present, in which a duplicate may still connect
_TO_TELL = 3.0  # seconds, after an error, in which late processes may connect to receive it


class _Who(NamedTuple):
    """A process that is present.

    Attributes:
        process: Its index.
        host: The name of its host.
        launcher: The indices that launchers gave it, by environment variable.
    """

    process: int
    host: str
    launcher: dict[str, str]

    def where(self) -> str:
        """Returns its host, with those environment variables, as text."""
        variables = ", ".join(f"{name}={number}" for name, number in self.launcher.items())
        return f"{self.host} ({variables})" if variables else self.host


def call(port: int, processes: int, host: str, timeout: float) -> None:
    """Waits on process 0 for all other processes, and sends them the result.

    Raises:
        JobError: A process is missing, was started twice, or has another index in
            JAX_PROCESS_ID. All processes that connected raise the same.
    """
    start = time.monotonic()
    deadline = start + timeout
    lines: list[socket.socket] = []
    there: list[tuple[socket.socket, _Who]] = []
    own = _Who(0, host, facts.launcher())
    here = lambda: [own, *(who for line, who in there if not _has_ended(line))]
    all_said = lambda: len({who.process for _, who in there} - {0}) >= processes - 1
    # When to stop waiting: at the deadline, or earlier if all are present or one is wrong.
    end = deadline if not _wrong([own], processes) else min(deadline, start + _TO_TELL)
    try:
        with _listening(port, host) as server:
            while True:
                if end == deadline and all_said():
                    end = time.monotonic() + _SETTLE
                try:
                    server.settimeout(max(0.001, end - time.monotonic()))
                    line, _ = server.accept()
                except TimeoutError:
                    # A process that has exited counts as missing until it is restarted.
                    there = [one for one in there if not _has_ended(one[0])]
                    is_late = time.monotonic() > deadline
                    if is_late or all_said() or _wrong(here(), processes):
                        break
                    end = deadline
                    continue
                lines.append(line)
                who = _who(_read(line, 2.0))
                if who is not None:
                    twice = who.process == 0 or any(
                        one.process == who.process and not _has_ended(other)
                        for other, one in there
                    )
                    there.append((line, who))
                    if twice or _wrong([who], processes):
                        end = min(deadline, time.monotonic() + _TO_TELL)
        came = here()
        why = _wrong(came, processes) or _missing(came, processes, timeout)
        for line in lines:
            _tell(line, why)
    finally:
        for line in lines:
            line.close()
    if why:
        raise JobError(why)


def answer(line: socket.socket, process: int, host: str, timeout: float) -> None:
    """Sends this process's index and host to process 0, and waits for the result.

    Raises:
        JobError: Process 0 reports an error, or does not answer.
    """
    own = _Who(process, host, facts.launcher())
    with line:
        _say(line, own)
        said = _read(line, timeout + _MORE)
    if said is None:
        raise JobError(
            f"process 0 did not answer process {process} on host {own.where()}: its job "
            f"has begun with another process {process}, or it was started in another way. "
            "Start each process once, all in the same way, process 0 among them."
        )
    if said["why"]:
        raise JobError(said["why"])


def _listening(port, host):
    """Returns a socket that listens at the port, on all of this host's addresses."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        _ask_another(port, host)
        raise JobError(
            f"process 0 cannot listen at port {port} on host {host} ({error.strerror}): "
            "another process 0 runs there, or another program. Name a port that is free."
        ) from None


def _ask_another(port, host):
    """Connects to another process 0 at this host's port, and raises the error it sends."""
    try:
        line = socket.create_connection(("localhost", port), timeout=2.0)
    except OSError:
        return
    with line:
        _say(line, _Who(0, host, facts.launcher()))
        said = _read(line, 2 * _TO_TELL)
    if isinstance(said, dict) and said.get("why"):
        raise JobError(said["why"])


def _say(line, own):
    try:
        line.sendall(json.dumps(own._asdict()).encode() + b"\n")
    except OSError:
        pass  # It may be the coordinator of JAX, which has another protocol.


def _read(line, timeout):
    """Returns the value that was received as a line of JSON; None if there is none."""
    deadline, text = time.monotonic() + timeout, b""
    try:
        while not text.endswith(b"\n") and len(text) < _LONGEST:
            line.settimeout(max(0.01, deadline - time.monotonic()))
            more = line.recv(_LONGEST)
            if not more:
                return None
            text += more
        return json.loads(text)
    except (OSError, ValueError):
        return None


def _who(said: Any) -> _Who | None:
    """Decodes a process; None if the value is not the message of one."""
    if not isinstance(said, dict):
        return None
    process, host, launcher = map(said.get, _Who._fields)
    if type(process) is not int or not isinstance(host, str):
        return None
    return _Who(process, host, launcher if isinstance(launcher, dict) else {})


def _has_ended(line):
    """Whether the other end has closed; a process that waits sends nothing more."""
    try:
        line.settimeout(0.0)
        return line.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _tell(line, why):
    try:
        line.settimeout(2.0)
        line.sendall(json.dumps({"why": why}).encode() + b"\n")
        # The end that closes first keeps its port in TIME_WAIT for a minute: wait until
        # the other one has.
        line.recv(1)
    except OSError:
        pass  # It has exited.


def _wrong(came: list[_Who], processes: int) -> str:
    """Returns an error that no further process can repair, as text; "" if there is none."""
    for who in came:
        named = who.launcher.get(facts.FOR_JAX)
        if named and named != str(who.process):
            return facts.misnumbered(named, who.process, f"host {who.host}")
    numbers = [who.process for who in came]
    beyond = sorted(set(numbers) - set(range(processes)))
    twice = [number for number, count in Counter(numbers).items() if count > 1]
    if beyond:
        return _told(f"there is no process {beyond[0]} of {processes}", came, processes)
    if twice:
        return _told(f"process {twice[0]} was started more than once", came, processes)
    return ""


def _missing(came: list[_Who], processes: int, timeout: float) -> str:
    """Returns a message that names the missing processes; "" if there are none."""
    missing = sorted(set(range(processes)) - {who.process for who in came})
    if not missing:
        return ""
    numbers = ", ".join(map(str, missing[:8])) + ", ..." * (len(missing) > 8)
    many = "processes" if len(missing) > 1 else "process"
    text = f"{many} {numbers} of {processes} did not come within {timeout:.3g} s"
    return _told(text, came, processes)


def _told(text: str, came: list[_Who], processes: int) -> str:
    hosts: dict[int, list[str]] = {}
    for who in came:
        hosts.setdefault(who.process, []).append(who.where())
    there = ", ".join(
        f"process {p} on host {' and '.join(hosts[p])}" for p in sorted(hosts)
    )
    return (
        f"{text}; there were {there}. Start each process once, with a number of its own "
        f"from 0 to {processes - 1}, on hosts that reach process 0."
    )
