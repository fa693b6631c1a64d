"""Real processes that talk over gloo hold the same bytes as simulated devices."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests import helpers


ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT = 240  # seconds; a collective that hangs must not hang the suite


def start(*arguments):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.laws.distributed_worker", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
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


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [2, *helpers.slow(3)])
def test_processes_hold_the_bytes_that_simulated_devices_hold(tmp_path, ranks):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
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
