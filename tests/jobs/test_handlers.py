"""Who hears of SIGTERM: JAX, or a handler of one's own."""

import subprocess
import sys

import pytest

from tests import helpers
from tests.helpers import processes


JOB = """
import os, signal, sys, time
import jax
from jax.experimental import multihost_utils

address, when = sys.argv[1:]
heard = []
install = lambda: signal.signal(signal.SIGTERM, lambda *_: heard.append("own"))
jax.config.update("jax_platforms", "cpu")
if when == "before":
    install()
jax.distributed.initialize(address, 1, 0)
if when == "after":
    install()
os.kill(os.getpid(), signal.SIGTERM)
for number in range(100 if when == "before" else 40):
    time.sleep(0.05)
    if multihost_utils.reached_preemption_sync_point(number):
        heard.append("JAX")
        break
print("heard by", *heard)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("when", "who"), [("before", "JAX"), *helpers.slow(("after", "own"))]
)
def test_sigterm_is_heard_by_the_handler_that_was_installed_last(when, who):
    """By that alone, and the process goes on."""
    run = subprocess.run(
        [sys.executable, "-c", JOB, processes.free_address(), when],
        capture_output=True,
        text=True,
        timeout=processes.TIMEOUT,
    )
    assert f"heard by {who}\n" in run.stdout, run.stderr
