"""Real processes that talk over gloo hold the same bytes as simulated devices."""

import itertools
import os
import pathlib
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests import helpers


ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT = 240  # seconds; a collective that hangs must not hang the suite


def start(*arguments, module="distributed_worker"):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.laws.{module}", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait(processes):
    try:
        for process in processes:
            output, _ = process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_one_process_alone_reads_a_state():
    """A collective would wait for the other, which does nothing."""
    coordinator = free_address()
    both = [start(coordinator, rank, module="alone_worker") for rank in (0, 1)]
    timer = threading.Timer(TIMEOUT / 2, lambda: [process.kill() for process in both])
    timer.start()
    try:
        lines = list(itertools.takewhile(lambda line: line != "alone\n", both[0].stdout))
        assert both[0].poll() is None, "".join(lines)
    finally:
        timer.cancel()
        for process in both:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [2, *helpers.slow(3)])
def test_processes_hold_the_bytes_that_simulated_devices_hold(tmp_path, ranks):
    coordinator = free_address()
    wait([start(tmp_path / "simulated.npz", ranks)])
    wait(
        [start(tmp_path / f"{rank}.npz", ranks, coordinator, rank) for rank in range(ranks)]
    )
    simulated = np.load(tmp_path / "simulated.npz")
    assert len(simulated.files) == 22
    for rank in range(ranks):
        held = np.load(tmp_path / f"{rank}.npz")
        for name in simulated.files:
            if ranks > 2 and "1.0_total" in name:
                # The dense sum of three is the back end's own, in an order of its own.
                np.testing.assert_allclose(
                    held[name], simulated[name], rtol=1e-5, atol=1e-6
                )
            else:
                assert held[name].tobytes() == simulated[name].tobytes(), (rank, name)
            first = np.load(tmp_path / "0.npz")[name]
            assert held[name].tobytes() == first.tobytes(), (rank, name)
