"""Kernels in the machine: a bounded part of `make ptx`, which runs all checks."""

import importlib.util

import pytest

from tests.ptx import mutants, opcodes, runs


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="needs Triton's compiler, which is there for Linux: pip install '.[triton]'",
    ),
]

# Each on an architecture.
PART = {
    ("triton", "messages.py"): 90,
    ("triton", "bitmap.py"): 100,
    ("triton", "partition.py"): 90,
    ("triton", "threshold_hash.py"): 100,
    ("triton", "coo_add.py"): 80,
    ("pallas", "threshold_hash.py"): 90,
}
LET_PASS = [name for name, one in mutants.MUTANTS.items() if one.interpreted]


@pytest.mark.parametrize(("case", "arch"), PART.items(), ids=map("/".join, PART))
def test_kernels_hold_in_any_order(case, arch):
    found = runs.run(case, arch, seed=0)
    assert not found.fault, found
    assert {*found.opcodes} <= opcodes.tested()


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_broken_kernel_is_found(name, tmp_path):
    assert mutants.found(name, tmp_path) is not None


@pytest.mark.parametrize("name", LET_PASS)
def test_the_interpreter_lets_a_race_pass(name, tmp_path):
    """Otherwise the machine is not needed for it, and the list says something else."""
    assert mutants.passes_interpreted(name, tmp_path)
