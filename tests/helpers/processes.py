"""Real processes of a `jax.distributed` job, which talk over gloo on this machine."""

import itertools
import os
import pathlib
import socket
import subprocess
import sys
import threading


ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT = 240  # seconds; a collective that hangs must not hang the suite


def free_address():
    """An address of this machine that a coordinator can listen at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def start(module, *arguments):
    """Starts `python -m module arguments` without what is set for this process's JAX."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # as in this one, for speed
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def printed(process, line):
    """What a process printed before a line that it must print, and go on living."""
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


def wait(processes):
    """Waits until all have ended well; with the output of one that has not, fails."""
    try:
        for process in processes:
            output, _ = process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
