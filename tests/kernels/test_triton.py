"""The Triton kernels, interpreted in a process of their own, and their mutants."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest


ROOT = pathlib.Path(__file__).parents[2]

# By name: the file, what stands there, and what the mutant has instead.
MUTANTS = {
    "a store for the swap": (
        "partition.py",
        'found = tl.atomic_cas(own + slot, expected, index, sem="relaxed")',
        "found = tl.load(own + slot)\n"
        "        tl.store(own + slot, index, mask=waiting & (found == -1))",
    ),
    "idle lanes swap": (
        "partition.py",
        "tl.where(waiting, -1, -2)",
        "tl.where(waiting, -1, -1)",
    ),
    "no end to the serial memory": (
        "partition.py",
        "fits = waiting & (ticket < SERIAL)",
        "fits = waiting",
    ),
    "tickets without atomics": (
        "partition.py",
        'ticket = tl.atomic_add(counts_ptr + part, 1, mask=waiting, sem="relaxed")',
        "ticket = tl.load(counts_ptr + part)\n"
        "        tl.store(counts_ptr + part, ticket + 1, mask=waiting)",
    ),
    "a round with the seed of the part": (
        "partition.py",
        "tl.load(seeds_ptr + 1 + k)",
        "tl.load(seeds_ptr + k)",
    ),
    "what is left is not told": (
        "partition.py",
        "over = waiting & (ticket >= SERIAL)",
        "over = waiting & (ticket > SERIAL)",
    ),
    "a range for all that wait": (
        "partition.py",
        "many = tl.sum(ones)",
        "many = tl.sum(waiting.to(tl.int32))",
    ),
    "ranks from one": (
        "partition.py",
        "first + tl.cumsum(ones, 0) - 1, ticket",
        "first + tl.cumsum(ones, 0), ticket",
    ),
    "every block but the last": (
        "partition_dense.py",
        "(SIZE + BLOCK * PROGRAMS - 1) // (BLOCK * PROGRAMS)",
        "SIZE // (BLOCK * PROGRAMS)",
    ),
    "one chunk a block": (
        "partition_dense.py",
        "while first < whole:",
        "while first < tl.minimum(whole, CHUNK):",
    ),
    "what fills no chunk is not moved": (
        "partition_dense.py",
        "        tl.store(own + thread, rest, mask=thread < held)\n",
        "",
    ),
    "the scratch of another": (
        "partition_dense.py",
        "own = scratch_ptr + program * (BLOCK + CHUNK)",
        "own = scratch_ptr + (program + 1) * (BLOCK + CHUNK)",
    ),
    "bits in the wrong order": (
        "words.py",
        "there.to(tl.uint32) << bit.to(tl.uint32)",
        "there.to(tl.uint32) << (31 - bit).to(tl.uint32)",
    ),
    "the last element is not read": (
        "words.py",
        "lane.to(tl.uint32, bitcast=True) < SIZE",
        "lane.to(tl.uint32, bitcast=True) < SIZE - 1",
    ),
    "a round too few": ("words.py", "while rounds > 0:", "while rounds > 1:"),
    "every bit one too high": (
        "words.py",
        "return count_bits(words ^ (words - 1)) - 1",
        "return count_bits(words ^ (words - 1))",
    ),
    "a rank too high": (
        "bitmap.py",
        "+ tl.cumsum(counts, 0) - counts",
        "+ tl.cumsum(counts, 0)",
    ),
    "all runs begin at the first": (
        "bitmap.py",
        "tl.load(ends_ptr + program)",
        "tl.load(ends_ptr)",
    ),
    "positions past the capacity": ("words.py", "& (rank < ROOM)", ""),
    "a hash a word": (
        "threshold_hash.py",
        "words = words & (words - 1)",
        "words = words & 0",
    ),
    "an entry before the range": (
        "coo_add.py",
        "meant = inside & (at >= 0) & (at < SIZE)",
        "meant = inside & (at < SIZE)",
    ),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or importlib.util.find_spec("triton") is None,
        reason="needs Triton, which is there for Linux: pip install '.[triton]'",
    ),
]


def run(*arguments, folder):
    environment = os.environ | {"MUTANTS": str(folder), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.kernels.triton_worker", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )


@pytest.mark.parametrize(
    "file",
    [
        "bitmap.py",
        "words.py",
        "partition.py",
        "partition_dense.py",
        "threshold_hash.py",
        "coo_add.py",
    ],
)
def test_the_kernels_hold_what_the_contract_says(file, tmp_path):
    done = run(file, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{file} holds" in done.stdout


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_kernel_is_caught(name, tmp_path):
    done = run(*MUTANTS[name], folder=tmp_path)
    assert done.returncode != 0, "the checks did not see it"
    # By a law that was broken, or by a crash: not because it does not run.
    crashed = done.returncode < 0
    assert crashed or "AssertionError" in done.stderr, done.stderr[-2000:]
    assert "is not once in" not in done.stderr
