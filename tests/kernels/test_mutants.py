"""Broken kernels: each must fail a check of `contract`, or that is worth little.

A mutant is one edit of a kernel's source, run as a module of its own, interpreted.
"""

import functools
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import pallas_kernels as kernels
from tests import helpers
from tests.kernels import contract


FOLDER = Path(kernels.__file__).parent

# By name: the file, what stands there, and what the mutant has instead.
MUTANTS = {
    "a full slot is written over": (
        "pallas/partition.py",
        "free = waiting & (found == EMPTY)",
        "free = waiting",
    ),
    "nobody reads back": (
        "pallas/partition.py",
        "(waiting & (found != indices))",
        "(waiting & (found == indices) & False)",
    ),
    "those who won wait on": (
        "pallas/partition.py",
        "(waiting & (found != indices))",
        "waiting",
    ),
    "all rounds use the seed of the part": (
        "pallas/partition.py",
        "hashing.place(indices, seeds_ref[1], memory.slots)",
        "hashing.place(indices, seeds_ref[0], memory.slots)",
    ),
    "idle lanes write": (
        "pallas/partition.py",
        "jnp.where(free, slot, spare), indices, free)",
        "slot, indices, lane >= 0)",
    ),
    "the serial memory forgets one": (
        "reference/partitions.py",
        "fits = still & (ticket < room)",
        "fits = still & (ticket < room - 1)",
    ),
    "what is left is not told": (
        "reference/partitions.py",
        'left = left.at[done].set(False, mode="drop")',
        "left = left & False",
    ),
    "bits in the wrong order": (
        "pallas/bitmap.py",
        "!= 0).astype(jnp.uint32) << bit.astype(jnp.uint32)",
        "!= 0).astype(jnp.uint32) << (31 - bit).astype(jnp.uint32)",
    ),
    "a rank too high": (
        "pallas/bitmap.py",
        "first + jnp.cumsum(counts) - counts",
        "first + jnp.cumsum(counts)",
    ),
    "all runs begin at the first": (
        "pallas/bitmap.py",
        "ends_ref[launch.program()]",
        "ends_ref[0]",
    ),
    "positions past the capacity": (
        "pallas/bitmap.py",
        "there = (words != 0) & (rank < capacity)",
        "there = words != 0; rank = jnp.minimum(rank, capacity - 1)",
    ),
    "a round too few": (
        "pallas/bitmap.py",
        "lax.fori_loop(0, jnp.max(counts)",
        "lax.fori_loop(1, jnp.max(counts)",
    ),
    "denormals are zero": (
        "pallas/bitmap.py",
        "(unsigned(x),)",
        "(unsigned(jnp.where(jnp.abs(x) < 1e-30, 0, x)),)",
    ),
    "the last elements are not read": (
        "pallas/threshold_hash.py",
        "-(-x.size // _BLOCK),",
        "max(1, x.size // _BLOCK),",
    ),
    "element 0 is empty": (
        "pallas/threshold_hash.py",
        "large = inside & (jnp.abs(x) >= level_ref[0])",
        "large = inside & (jnp.abs(x) >= level_ref[0]) & (lane > 0)",
    ),
}
# Interpreted whole, which takes its time.
SLOW = [
    "pallas/partition.py",
    "reference/partitions.py",
]


def module(file, old="", new=""):
    """A kernel's file with one edit, as a module."""
    source = (FOLDER / file).read_text()
    if old:
        assert source.count(old) == 1, f"{old!r} is not once in {file}"
        source = source.replace(old, new)
    made = types.ModuleType("mutant")
    exec(compile(source, file, "exec"), made.__dict__)
    return made


def sparse(size):
    rng = np.random.default_rng(size)
    x = rng.standard_normal(size) * (rng.random(size) < 0.3)
    x[[0, 5, -1]] = 3.0, 1e-40, -2.0
    return x.astype(np.float32)


def check_partition(partition):
    seeds = kernels.draw_seeds(4)
    for slots, serial in ((32, 8), (256, 32)):
        sizes = {"parts": 8, "slots": slots, "serial": serial, "hashes": 3}
        run = jax.jit(functools.partial(partition, memory=kernels.HashMemory(**sizes)))
        indices = np.arange(1025, dtype=np.int32)
        contract.check_partition(
            lambda indices, count, seeds, run=run, **_: run(indices, count, seeds),
            indices,
            1020,
            seeds,
            **sizes,
        )


def check_bitmap(made):
    x = sparse(20_001)  # over several programs
    for capacity in (16_000, 20):
        contract.check_bitmap(
            lambda x, _: made.bitmap_encode(x, interpret=True),
            lambda words, capacity, _: made.bitmap_decode(
                words, capacity, 32 * len(words), interpret=True
            ),
            x,
            capacity,
        )


def check(file, made):
    """Runs the check that goes with a file."""
    if file == "pallas/partition.py":
        check_partition(functools.partial(made.partition, interpret=True))
    elif file == "reference/partitions.py":
        check_partition(made.partition)
    elif file == "pallas/bitmap.py":
        check_bitmap(made)
    else:
        run = functools.partial(made.threshold_hash, interpret=True)
        for seed in kernels.draw_seeds(3):  # by one, two elements may share a slot
            contract.check_threshold_hash(run, sparse(5000), 0.5, seed, 1 << 14)


FILES = sorted({file for file, _, _ in MUTANTS.values()} - {*SLOW})


@pytest.mark.parametrize("file", [*FILES, *helpers.slow(*SLOW)])
def test_what_is_not_broken_passes(file):
    check(file, module(file))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if file in SLOW else [])
        for name, (file, _, _) in MUTANTS.items()
    ],
)
def test_a_broken_kernel_is_caught(name):
    file, old, new = MUTANTS[name]
    made = module(file, old, new)
    with pytest.raises(AssertionError):
        check(file, made)
