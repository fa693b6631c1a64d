"""Checks of the coordinator before `jax.distributed.initialize` waits for it.

If a process is missing when its timeout ends, that call ends the process without naming the
cause. The most frequent cause is a name of the coordinator that each host resolves to
itself: "localhost", or a name to which /etc/hosts gives a loopback address.
"""

import errno
import os
import socket
import time

from sparsejax import arguments
from sparsejax.errors import ArgumentError, JobError
from sparsejax.jobs.start import facts, launchers, roll_call


_BETWEEN = 0.2  # seconds between two tries


def check_coordinator(
    address: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    one_host: bool = False,
    timeout: float = 60.0,
) -> None:
    """Checks that all processes of a job reach the coordinator, before JAX joins the job.

    All processes call it. They meet at the coordinator's port, which is free again when JAX
    needs it. If some are missing, those that came raise an error that names them. After it
    call `jax.distributed.initialize(address, processes, process)` and
    `sparsejax.check_job()`. Under Slurm and Open MPI 4 leave out all three arguments in
    both calls: JAX finds them. Elsewhere nothing is checked without them.

    Args:
        address: The coordinator as "name:port", as `jax.distributed.initialize` takes it;
            None, with both numbers, for the job that a launcher has started.
        processes: The number of processes of the job.
        process: The index of this process; 0 is the coordinator.
        one_host: Whether all processes run on one host. A loopback address is then right.
        timeout: Seconds to wait for the name to be resolved, and for the other processes.

    Raises:
        ArgumentError: The address is not written "name:port", there is no such process, or
            one of the three is not given.
        JobError: The name does not resolve on this host, or resolves to a loopback address;
            no process listens there; processes are missing or were started twice; or
            JAX_PROCESS_ID differs from the index of a process.

    Example:
        >>> sparsejax.advise.check_coordinator("localhost:12345", 1, 0, one_host=True)

    See Also:
        `sparsejax.check_job`: compares the processes, once JAX has joined the job.
        `sparsejax.advise.watch_job`: ends the job if a process is lost.
    """
    if address is None and processes is None and process is None:
        job = launchers.found()
        if job is None:
            return None
        address, processes, process = job
        one_host = True  # Accept a loopback: JAX takes this name from the launcher, too.
    if address is None or processes is None or process is None:
        raise ArgumentError(
            "give check_coordinator the address, processes and process of a job together, "
            "or none of them under Slurm and Open MPI 4."
        )
    arguments.check_whole("processes", processes, 1)
    arguments.check_whole("process", process, 0)
    if process >= processes:
        raise ArgumentError(
            f"process must be one of 0 to {processes - 1}, for processes={processes}, got "
            f"{process}."
        )
    arguments.check_positive("timeout", timeout)
    name, port = facts.split(address)
    if not name or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ArgumentError(
            f"the coordinator must be written name:port, as node1:12345, got {address!r}."
        )
    deadline, here = time.monotonic() + timeout, socket.gethostname()
    while not (found := facts.addresses(name)):
        # The names of pods are known some time after the pods have started.
        if time.monotonic() > deadline:
            raise JobError(
                f"host {here} (process {process}) does not know the coordinator's name "
                f"{name!r}: give the address of process 0's host, or a name that all hosts "
                "can look up."
            )
        time.sleep(_BETWEEN)
    # A name may be wrong on process 0 alone, if its /etc/hosts gives it 127.0.1.1. The
    # others can connect, and `check_job` reports it on all of them.
    for_all = process > 0 or name == "localhost" or name in found
    if facts.is_loopback(found) and not one_host and for_all:
        raise JobError(loopback(address, found, f"host {here} (process {process})"))
    if processes == 1 and facts.launcher().get(facts.FOR_JAX, "0") == "0":
        return None
    if process == 0:
        return roll_call.call(int(port), processes, here, deadline - time.monotonic())
    while isinstance(line := _connected(name, int(port)), OSError):
        if time.monotonic() > deadline:
            why = line.strerror or line
            raise JobError(
                f"host {here} (process {process}) could not reach the coordinator at "
                f"{address} ({', '.join(found)}) in {timeout:g} s: {why}. Process 0 "
                "must run on that host and be started within this time, and "
                f"firewalls must let port {port} pass."
            )
        time.sleep(_BETWEEN)
    return roll_call.answer(line, process, here, timeout)


def loopback(address: str, found: list[str], who: str) -> str:
    """Returns the message about a coordinator that only its own host can reach."""
    return (
        f"the coordinator {address} stands for {', '.join(found)} on {who}, an address "
        "that no other host can reach. Give process 0's address in the network between the "
        "hosts; if it is a name, correct it in /etc/hosts. If all processes run on one "
        "host, say so: one_host=True, or --one-host on the command line."
    )


def _connected(name: str, port: int) -> socket.socket | OSError:
    """Returns a connection, or the error if there is none."""
    try:
        line = socket.create_connection((name, port), timeout=2.0)
    except OSError as error:
        return error
    if line.getsockname() == line.getpeername():
        # If no process listens, a connection on the same host may be assigned the port of
        # its destination as its own, and is then connected to itself.
        line.close()
        return ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    return line
