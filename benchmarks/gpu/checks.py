"""Are the kernels right on this device: tests, many threads at few slots, huge arrays."""

import dataclasses
import functools
import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as kernels
from benchmarks.harness.record import say
from pallas_kernels import backends, hashing, rank_select


LARGEST = 2**31 - 1  # elements that int32 can number


def probe(context) -> bool:
    """Does each backend run at all, and say what the reference says?"""
    x = jnp.asarray(np.arange(4096) % 7 == 0, jnp.float32)
    expected = kernels.bitmap_encode(x, backend="reference")
    missing = {}
    for name in backends.BACKENDS:
        try:
            if why := backends.why_not(name):
                raise kernels.BackendError(why)
            words = jax.jit(functools.partial(kernels.bitmap_encode, backend=name))(x)
            assert (words == expected).all(), "its bits are not those of the reference"
            say(f"{name} runs")
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {str(error)[:500]}"
            say(f"{name} does not run: {missing[name]}")
    context.record.add(part="probe", missing=missing)
    return not (context.gpu and missing)


def suite(context) -> bool:
    """The tests of the kernels, on the device."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    # A plugin that warns where xdist runs, and warnings are errors in tests.
    command += ["-p", "no:benchmark"]
    # Pallas' Triton backend is deprecated, and JAX warns of it.
    command += ["-W", "ignore::DeprecationWarning", "--optimized"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "8"]  # Most of the time is XLA's, on the processor.
    files = ("test_kernels.py", "test_backends.py", "test_messages.py")
    command += [f"tests/kernels/{file}" for file in files]
    if not context.gpu:
        command += ["-k", "bad_arguments"]  # The rest runs there as part of all tests.
    with (context.out / "suite.txt").open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
    lines = (context.out / "suite.txt").read_text().strip().splitlines()
    last = lines[-1] if lines else "nothing ran"
    say(last)
    context.record.add(part="suite", status=done.returncode, summary=last)
    return done.returncode == 0


def contended(context) -> bool:
    """Many indices, few slots: who is stored, who waits and who is left is checked."""
    size = 1 << 18 if context.gpu else 4096
    how = {"memory": kernels.HashMemory(8, size // 16, size // 64, hashes=3)}
    check = jax.jit(functools.partial(_is_whole, **how))
    well = True
    for name in reversed(context.backends):  # Those with threads of their own first.
        run = jax.jit(functools.partial(kernels.partition, backend=name, **how))
        run_dense = functools.partial(kernels.partition_dense, backend=name, **how)
        run_dense = jax.jit(run_dense)
        runs = context.runs if name != "reference" else max(1, context.runs // 10)
        wrong = 0
        for seed in range(runs):
            indices = jnp.arange(seed, seed + size, dtype=jnp.int32)
            seeds = kernels.draw_seeds(4, seed)
            wrong += not bool(check(indices, seeds, run(indices, size, seeds)))
            if name != "pallas":  # It has no such kernel.
                done = run_dense(jnp.ones(size), seeds)
                left = rank_select.unpack(done.left)[:size]
                done = done._replace(left=left)
                wrong += not bool(check(jnp.arange(size), seeds, done))
        say(f"{name}: {wrong} of {runs} runs wrong")
        context.record.add(part="contended", backend=name, runs=runs, wrong=wrong)
        well &= not wrong
    return well


def _is_whole(indices, seeds, done, *, memory):
    """The laws of `tests.kernels.contract` but the last, on the device, for speed."""
    parts, slots, serial, hashes = dataclasses.astuple(memory)
    memory, left = done.memory, done.left
    there = memory >= 0
    highest = jnp.iinfo(jnp.int32).max
    stored = jnp.where(there, memory, highest).reshape(-1)
    listed = jnp.sort(jnp.concatenate([stored, jnp.where(left, indices, highest)]))
    once = (listed[: indices.size] == jnp.sort(indices)).all()
    once &= jnp.sum(there) + jnp.sum(left) == indices.size
    number = jnp.arange(parts)[:, None]
    owned = (hashing.place(memory, seeds[0], parts) == number) | ~there
    slot = jnp.arange(slots)
    legal = ~there[:, :slots]
    for k in range(1, hashes + 1):
        legal |= hashing.place(memory[:, :slots], seeds[k], slots) == slot
    stored_serially = jnp.minimum(done.counts, serial)[:, None]
    prefix = there[:, slots:] == (jnp.arange(serial) < stored_serially)
    over = (hashing.place(indices, seeds[0], parts) == number) & left
    exact = jnp.sum(over, axis=1) == done.counts - stored_serially[:, 0]
    return once & owned.all() & legal.all() & prefix.all() & exact.all()


def largest(context) -> bool:
    """Arrays with as many elements as int32 can number: does anything wrap?"""
    size = LARGEST if context.gpu else 1 << 20
    places = np.unique(np.concatenate([np.arange(40), np.geomspace(41, size, 200) - 1]))
    places = places.astype(np.int32)
    x = jnp.zeros(size, jnp.bfloat16).at[jnp.asarray(places)].set(1)
    seeds = jnp.asarray(kernels.draw_seeds(4))
    room = kernels.HashMemory(parts=4, slots=256, serial=64, hashes=3)
    operations = {
        "compact": lambda name: kernels.compact(x, 512, backend=name)[0][: len(places)],
        "partition_dense": lambda name: (
            kernels.partition_dense(x, seeds, room, backend=name).memory
        ),
        "threshold_hash": lambda name: kernels.threshold_hash(
            x, 0.5, 7, slots=1 << 20, backend=name
        ),
    }
    well = True
    for name in reversed(context.backends):
        if name == "reference" and context.gpu:
            continue  # It has no indices of its own, and takes long to compile.
        for operation, run in operations.items():
            try:
                positions = np.asarray(run(name)).reshape(-1)
            except kernels.BackendError:
                continue  # This operation has no such kernel.
            positions = np.sort(positions[(positions >= 0) & (positions < size)])
            right = (
                np.isin(positions, places).all() and len(positions) > 0.9 * len(places)
                if operation == "threshold_hash"  # Of two in a slot one stays.
                else np.array_equal(positions, places)
            )
            verdict = "right" if right else "NOT right"
            say(f"{operation} of {size:,} elements by {name}: {verdict}")
            context.record.add(
                part="largest", operation=operation, backend=name, right=bool(right)
            )
            well &= bool(right)
    return well


def sums(context) -> bool:
    """Is a scatter-add with repeated indices the same twice, byte for byte?"""
    rng = np.random.default_rng(0)
    indices = jnp.asarray(rng.integers(0, 1000, 1 << 20), jnp.int32)
    values = jnp.asarray(rng.standard_normal(1 << 20), jnp.float32)
    run = jax.jit(lambda indices, values: jnp.zeros(1000).at[indices].add(values))
    seen = {np.asarray(run(indices, values)).tobytes() for _ in range(20)}
    say(f"{len(seen)} different results in 20 runs")
    context.record.add(part="sums", backend="reference", results=len(seen))
    return True
