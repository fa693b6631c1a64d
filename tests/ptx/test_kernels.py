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

# Those that take seconds, on an architecture each.
SHORT = {
    ("triton", "coo_add.py"): 80,
    ("triton", "partition.py"): 90,
    ("triton", "threshold_hash.py"): 100,
    ("pallas", "threshold_hash.py"): 90,
}
# Caught after seconds; `python -m tests.ptx.mutants` has all.
SOON = (
    "slots are written and read back in one launch",
    "a range of tickets is reserved by a load and a store",
    "a ticket is reserved by a load and a store",
    "the serial memory has no end",
    "entries are added without atomics",
    "warps of a cumulative sum do not wait",
    "tickets are added as floats",
    "numbers past the end are loaded",
)
# What Triton's interpreter lets pass, of these.
LET_PASS = (
    "slots are written and read back in one launch",
    "a range of tickets is reserved by a load and a store",
)


@pytest.mark.parametrize(("case", "arch"), SHORT.items(), ids=map("/".join, SHORT))
def test_kernels_hold_in_any_order(case, arch):
    found = runs.run(case, arch, seed=0)
    assert not found.fault, found
    assert {*found.opcodes} <= opcodes.tested()


@pytest.mark.parametrize("name", SOON)
def test_a_broken_kernel_is_found(name, tmp_path):
    assert mutants.found(name, tmp_path) is not None


@pytest.mark.parametrize("name", LET_PASS)
def test_the_interpreter_lets_a_race_pass(name, tmp_path):
    assert mutants.MUTANTS[name].interpreted
    assert mutants.passes_interpreted(name, tmp_path)
