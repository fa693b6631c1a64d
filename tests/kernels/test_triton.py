"""The Triton kernels, interpreted in a process of their own.

Their mutants are those of `tests/laws/mutants/triton.toml`.
"""

import importlib.util
import sys

import pytest

from tests.helpers import processes


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or importlib.util.find_spec("triton") is None,
        reason="needs Triton, which is there for Linux: pip install '.[triton]'",
    ),
]


# A process for several, as starting one takes longer than most checks. What `words.py`,
# `slots.py` and `index_message.py` have is held to it by the kernels that call it.
@pytest.mark.parametrize(
    "files",
    [
        ("bitmap.py", "threshold_hash.py"),
        ("partition.py", "partition_dense.py"),
        # All messages: `python -m tests.kernels.triton_worker`, and `make ptx`.
        ("most messages",),
        ("exchange",),
    ],
    ids=lambda files: files[0],
)
def test_the_kernels_hold_what_the_contract_says(files):
    process = processes.fork("tests.kernels.triton_worker", "hold", *files)
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        process.kill()
    assert process.returncode == 0, output[-2000:]
    holds = [line for line in output.splitlines() if line.endswith(" holds")]
    assert holds == [f"{name} holds" for name in files]
