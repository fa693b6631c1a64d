"""Who of a job is there, asked by process 0 before JAX joins the job.

`jax.distributed.initialize` ends a process whose job does not come together in time, and
does not say who is missing. Here each process says its number and its host to process 0,
over one connection to the port on which JAX will listen, and is told whether all came.
"""

import json
import socket
import time

from sparsejax.errors import JobError


_LONGEST = 1 << 12  # bytes of what a process says
_MORE = 10.0  # seconds that others wait longer than process 0


def call(port: int, processes: int, host: str, timeout: float) -> None:
    """Waits for all other processes, and tells them whether all came; on process 0.

    Raises:
        JobError: Some did not come, or came twice; those that came are told the same.
    """
    deadline = time.monotonic() + timeout
    lines: list[socket.socket] = []
    there: list[tuple[socket.socket, int, str]] = []
    all_said = lambda: len({process for _, process, _ in there}) >= processes - 1
    try:
        with _listening(port, host) as server:
            while time.monotonic() < deadline:
                if all_said():
                    # One that was stopped has not come until it is started again.
                    there = [one for one in there if not _has_ended(one[0])]
                    if all_said():
                        break
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    line, _ = server.accept()
                except TimeoutError:
                    break
                lines.append(line)
                said = _read(line, 2.0)
                if isinstance(said, dict) and {"process", "host"} <= set(said):
                    there.append((line, said["process"], said["host"]))
        came = {0: [host]}
        for line, process, where in there:
            if not _has_ended(line):
                came.setdefault(process, []).append(where)
        why = _missing(came, processes, timeout)
        for line in lines:
            _tell(line, why)
    finally:
        for line in lines:
            line.close()
    if why:
        raise JobError(why)


def answer(line: socket.socket, process: int, host: str, timeout: float) -> None:
    """Says over a connection to process 0 who this is, and waits for all others.

    Raises:
        JobError: Process 0 says that not all came, or says nothing.
    """
    with line:
        try:
            line.sendall(json.dumps({"process": process, "host": host}).encode() + b"\n")
        except OSError:
            pass  # JAX's own coordinator, which does not listen to this; see below.
        said = _read(line, timeout + _MORE)
    if said is None:
        raise JobError(
            f"process 0 did not answer process {process} on host {host}: start all "
            "processes in the same way, process 0 among them."
        )
    if said["why"]:
        raise JobError(said["why"])


def _listening(port, host):
    """A socket at the port, on all of this host's addresses."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise JobError(
            f"process 0 cannot listen at port {port} on host {host} ({error.strerror}): "
            "another process 0 runs there, or another program. Name a port that is free."
        ) from None


def _read(line, timeout):
    """What came as a line of JSON; None where nothing of the kind did."""
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


def _has_ended(line):
    """Whether the process at the other end is gone; one that waits says nothing more."""
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
        # Who closes first keeps the port busy for a minute: let it be the other side.
        line.recv(1)
    except OSError:
        pass  # It has ended.


def _missing(came: dict[int, list[str]], processes: int, timeout: float) -> str:
    """Why the job is not whole; "" where it is."""
    wrong = sorted(set(came) - set(range(processes)))
    twice = [process for process, hosts in came.items() if len(hosts) > 1]
    missing = [process for process in range(processes) if process not in came]
    there = ", ".join(f"process {p} on host {' and '.join(came[p])}" for p in sorted(came))
    if not (wrong or twice or missing):
        return ""
    if wrong:
        text = f"there is no process {wrong[0]} of {processes}"
    elif twice:
        text = f"process {twice[0]} was started more than once"
    else:
        numbers = ", ".join(map(str, missing[:8])) + ", ..." * (len(missing) > 8)
        many = "processes" if len(missing) > 1 else "process"
        text = f"{many} {numbers} of {processes} did not come within {timeout:.3g} s"
    return (
        f"{text}; there were {there}. Start each process once, with a number of its own "
        f"from 0 to {processes - 1}, on hosts that reach process 0."
    )
