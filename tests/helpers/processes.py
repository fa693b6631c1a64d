"""Real processes of a `jax.distributed` job, which talk over gloo on this machine."""

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


ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT = 240  # seconds; a collective that hangs must not hang the suite


def free_address():
    """An address of this machine that a coordinator can listen at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def start(module, *arguments, **more):
    """Starts `python -m module arguments` without what is set for this process's JAX.

    Args:
        module: What runs as a script.
        arguments: Its arguments.
        more: Variables of its environment besides those of this process.
    """
    return _opened(["-m", module, *map(str, arguments)], more)


def fork(module, *arguments, folder=ROOT, **more):
    """The same for a tenth of the time, as `tests.helpers.forks` has imported JAX.

    It runs in this folder. What JAX reads of the environment as it is imported may not be
    in `more`.
    """
    more = {"PYTHONPATH": str(ROOT)} | more
    if sys.platform != "linux":  # elsewhere libraries forbid what is done after a fork
        return _opened(["-m", module, *map(str, arguments)], more, folder)
    script = pathlib.Path(__file__).with_name("forks.py")
    line = [script, "stand-in", _forks(script), module, *map(str, arguments)]
    return _opened(["-I", "-S", *line], more, folder)


@functools.cache
def _forks(script):
    """The socket of a process that forks for this one."""
    folder = tempfile.TemporaryDirectory()
    path = pathlib.Path(folder.name, "socket")
    # `-P`: its folder is no place to import from.
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
    environment["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # as in this one, for speed
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
