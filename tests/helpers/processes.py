"""Real processes of a `jax.distributed` job, which use gloo on this machine."""

import atexit
import functools
import itertools
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time

import jax


ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT = 240  # seconds; a collective that hangs must not hang the suite


def free_address():
    """Returns an address of this machine at which a coordinator can listen."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


# The least of the ports that JAX takes in a launcher's job, to which it adds its number.
LEAST_OF_LAUNCHERS = 61_440


def free_port_of_launchers():
    """Returns a free port among those that JAX takes for jobs of launchers."""
    for port in range(LEAST_OF_LAUNCHERS + os.getpid() % 1000, 65_535):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("there is no free port")


def start(module, *arguments, **more):
    """Starts `python -m module arguments`, without this process's JAX_ variables.

    Args:
        module: The module that runs as a script.
        arguments: Its arguments.
        more: Environment variables in addition to those of this process.
    """
    return _opened(["-m", module, *map(str, arguments)], more)


def fork(module, *arguments, folder=ROOT, **more):
    """Starts a module as `start` does in a tenth of the time, by `tests.helpers.forks`.

    It runs in `folder`. `more` must not have variables that JAX reads when it is imported:
    the fork server has imported it.
    """
    more = {"PYTHONPATH": str(ROOT)} | more
    if sys.platform != "linux":  # elsewhere system libraries do not work after a fork
        return _opened(["-m", module, *map(str, arguments)], more, folder)
    script = pathlib.Path(__file__).with_name("forks.py")
    line = [script, "stand-in", _forks(script), module, *map(str, arguments)]
    return _opened(["-I", "-S", *line], more, folder)


@functools.cache
def _forks(script):
    """Starts a fork server for this process, once, and returns its socket."""
    folder = tempfile.TemporaryDirectory()
    path = pathlib.Path(folder.name, "socket")
    # `-P`: the folder of the script must not be in its path of imports.
    forks = _opened(["-P", script, "serve", path], {"PYTHONPATH": str(ROOT)})

    def end():
        forks.communicate()
        folder.cleanup()

    atexit.register(end)
    while not path.exists():
        assert forks.poll() is None, forks.communicate()[0]
        time.sleep(0.05)
    return path


def _opened(arguments, more, folder=ROOT):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # as in this process, for speed
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment | more,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def printed(process, line):
    """Returns what a process prints before a line, which it must print and survive."""
    timer = threading.Timer(TIMEOUT / 2, process.kill)
    timer.start()
    try:
        before = list(
            itertools.takewhile(lambda other: other != line + "\n", process.stdout)
        )
        assert process.poll() is None, "".join(before)
        return before
    finally:
        timer.cancel()


def outputs(jobs):
    """Returns what each process has printed, once all have exited."""
    try:
        return [job.communicate(timeout=TIMEOUT)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def wait(processes):
    """Waits until all have exited with 0; fails with the output of one that did not."""
    try:
        for process in processes:
            output, _ = process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()


def take_part(processes, devices, coordinator=None, rank=0):
    """Makes this process one of a job, or the whole of it where there is no coordinator.

    Call it before JAX's back end is settled.

    Args:
        processes: How many there are.
        devices: How many devices all of them have.
        coordinator: The address of the coordinator.
        rank: The number of this process.
    """
    jax.config.update("jax_platforms", "cpu")
    if coordinator is None:
        jax.config.update("jax_num_cpu_devices", devices)
        return
    jax.config.update("jax_num_cpu_devices", devices // processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    limits = {"initialization_timeout": 60, "heartbeat_timeout_seconds": 60}
    jax.distributed.initialize(coordinator, processes, rank, **limits)
