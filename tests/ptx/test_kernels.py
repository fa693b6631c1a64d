"""Kernels in the machine: a bounded part of `make ptx`, which runs all checks."""

import dataclasses
import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Received, Unpacking
from tests.kernels import checks, messages
from tests.ptx import mutants, opcodes, runs
from tests.ptx.launches import Gpu


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="needs Triton's compiler, which is there for Linux: pip install '.[triton]'",
    ),
]

# Each on an architecture.
PART = {
    ("triton", "some messages"): 90,
    ("triton", "bitmap.py"): 100,
    ("triton", "partition.py"): 90,
    ("triton", "threshold_hash.py"): 80,
    ("pallas", "threshold_hash.py"): 90,
}
# One of each kind: a race, a missing barrier, another operation, a wrong mask. The others
# are left to `python -m tests.ptx.mutants`.
LETS_PASS = "a range of tickets is reserved by a load and a store"
BROKEN = (
    LETS_PASS,
    "warps of a cumulative sum do not wait",
    "tickets are added as floats",
    "numbers past the end are loaded",
)


@pytest.mark.parametrize(("case", "arch"), PART.items(), ids=map("/".join, PART))
def test_kernels_hold_in_any_order(case, arch):
    found = runs.run(case, arch, seed=0)
    assert not found.fault, found
    assert {*found.opcodes} <= opcodes.tested()


def sums(ordered: bool) -> set[bytes]:
    """What four senders add up to, in three orders of warps."""
    case = messages.Case(words=9, density=(0.3,) * 4, capacity=128)
    message, values = case.received.copy(), case.numbers[messages.AT + 4]
    drawn = np.random.default_rng(0).standard_normal((4, case.length)).astype(np.float32)
    message[:, values : values + case.length] = drawn.view(np.uint32)
    found = set()
    for seed in range(3):
        made = checks.load("messages.py", Gpu(90, seed).launched)
        made._TILE = 64, 256
        total = made.unpack_message(
            jnp.zeros(case.width),
            Received(jnp.asarray(message)),
            jnp.asarray(case.numbers),
            spec=case.spec,
            how=Unpacking(ordered=ordered),
        )
        assert np.asarray(total).any()
        found.add(np.asarray(total).tobytes())
    return found


def test_an_ordered_sum_has_the_same_bits_in_any_order_of_warps():
    assert len(sums(ordered=True)) == 1
    assert len(sums(ordered=False)) > 1


def steps_of(first: int, last: int) -> int:
    """The steps of programs that unpack a piece of the bitmaps of three senders."""
    case, gpu = messages.BITMAPS["half of all"], Gpu(90)
    index = checks.load("index_message.py", gpu.launched)
    made = checks.load("bitmap.py", gpu.launched)
    made._SLOTS = 64
    message, numbers = jnp.asarray(case.received), jnp.asarray(case.numbers)
    spec = dataclasses.replace(case.spec, longest=case.words, bitmaps=True)
    _, table = index.index_message(message, numbers, spec=spec)
    before = gpu.counts["steps"]
    made.unpack_bitmaps(
        jnp.zeros(case.striping.size),
        Received(message, table),
        numbers,
        spec=spec,
        how=Unpacking(replaces=True, first=first, last=last),
    )
    return gpu.counts["steps"] - before


def test_programs_leave_whose_slots_are_in_other_pieces():
    whole = steps_of(0, 1056)
    assert steps_of(1040, 1044) < whole / 4  # nobody has so many
    assert steps_of(0, 4) < whole / 2


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_found(name, tmp_path):
    assert mutants.found(name, tmp_path) is not None


def test_the_interpreter_lets_a_race_pass(tmp_path):
    """Otherwise the machine is not needed for it, and the list says something else."""
    assert mutants.MUTANTS[LETS_PASS].interpreted
    assert mutants.passes_interpreted(LETS_PASS, tmp_path)
