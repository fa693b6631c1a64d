"""Kernels in the exchange, interpreted: the same sums and the same bytes as without.

All of the conformance table takes half an hour: `python -m tests.laws.by_backend triton`,
or `ptx`. Here are those that call different kernels.
"""

import importlib.util
import subprocess
import sys

import pytest

import pallas_kernels
from tests.laws import by_backend


pytestmark = pytest.mark.slow
HAS_TRITON = sys.platform == "linux" and importlib.util.find_spec("triton") is not None


def test_pallas_sums_and_sends_what_the_reference_does():
    """Numbers; of rows it takes the same kernels, which `tests/kernels` holds to both."""
    kernels = pallas_kernels.use_kernels("pallas", interpret=True)
    assert by_backend.check("balanced", "numbers", kernels) > 20


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: pip install '.[triton]'")
@pytest.mark.parametrize(
    ("backend", "names"),
    [("triton", ["balanced_algorithm_1:numbers"]), ("ptx", ["zen:listed rows"])],
)
def test_triton_sums_and_sends_what_the_reference_does(backend, names):
    """Interpreted, and executed from the PTX that a GPU is given."""
    command = [sys.executable, "-m", "tests.laws.by_backend", backend, *names]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    compared = [int(line.split()[-2]) for line in ended.stdout.splitlines()]
    assert len(compared) == len(names)
    assert min(compared) > 5
