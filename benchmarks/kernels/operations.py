"""Times of the kernels on this device, by backend and against other implementations.

Every result is checked before it is timed; sides take turns.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as kernels
from benchmarks.harness import timing
from benchmarks.harness.record import Recorder, say
from benchmarks.kernels.partition_cpp import partition_in_cpp
from pallas_kernels import backends, hashing, rank_select


SIZE = 1 << 24
PARTS = 16
REPEATS = 11


def gradient(density: float, size: int = SIZE) -> np.ndarray:
    """Zeros, and ones of this density."""
    rng = np.random.default_rng(0)
    x = np.zeros(size, np.float32)
    x[rng.random(size, np.float32) < density] = 1.0
    return x


def by_backend(operation) -> dict:
    """The operation compiled for each backend that runs here."""
    return {
        name: jax.jit(functools.partial(operation, backend=name))
        for name in backends.BACKENDS
        if backends.why_not(name) is None
    }


def timed(record: Recorder, part: str, sides: dict, **about) -> dict[str, list[float]]:
    """Times sides in turn, and prints their times over those of the reference."""
    times = timing.alternate(sides, REPEATS)
    ratios = timing.ratios(times, "reference")
    timing.show(times, ratios, "times reference")
    for name, taken in times.items():
        record.add(part=part, side=name, seconds=taken, ratio=ratios[name], **about)
    return times


def compact(record: Recorder) -> None:
    """The indices of non-zeros, against jnp.nonzero and NumPy."""
    say(f"\ncompact: {SIZE:,} floats, 1%; times of one read of them come first")
    host = gradient(0.01)
    x = jnp.asarray(host)
    expected = np.flatnonzero(host)
    capacity = int(1.25 * expected.size)
    ours = by_backend(lambda x, backend: kernels.compact(x, capacity, backend=backend))
    sides = {
        name: functools.partial(lambda run: run(x)[0], run) for name, run in ours.items()
    }
    nonzero = jax.jit(lambda x: jnp.nonzero(x, size=capacity, fill_value=SIZE)[0])
    total = jax.jit(jnp.sum)
    sides |= {"one read": lambda: total(x), "jnp.nonzero": lambda: nonzero(x)}
    sides["NumPy flatnonzero"] = lambda: np.flatnonzero(host != 0)
    for name in ours:
        positions = np.asarray(sides[name]())
        assert (positions[: expected.size] == expected).all(), name
    timed(record, "compact", sides, size=SIZE, density=0.01)


def decode(record: Recorder) -> None:
    """The positions of set bits, against unpacking them and jnp.nonzero."""
    for density in (0.01, 0.08):
        _decode(record, SIZE // 16, density)


def _decode(record, bits, density):
    say(f"\nbitmap_decode: {bits:,} bits, {density:.0%}")
    flags = np.random.default_rng(1).random(bits) < density
    words = rank_select.pack(jnp.asarray(flags))
    expected = np.flatnonzero(flags)
    capacity = int(1.25 * expected.size)
    ours = by_backend(
        lambda words, backend: kernels.bitmap_decode(words, capacity, backend=backend)
    )
    sides = {
        name: functools.partial(lambda run: run(words)[0], run)
        for name, run in ours.items()
    }
    unpack = jax.jit(
        lambda words: jnp.nonzero(
            rank_select.unpack(words), size=capacity, fill_value=bits
        )[0]
    )
    sides["unpack and nonzero"] = lambda: unpack(words)
    for name, run in sides.items():
        assert (np.asarray(run())[: expected.size] == expected).all(), name
    timed(record, "bitmap_decode", sides, bits=bits, density=density)


def hashed(indices, k: int, memory: float) -> kernels.HashMemory:
    """The memory of Algorithm 1 as in the paper: r1 = memory * indices, r2 = r1 / 10."""
    slots = max(1, round(memory * indices.size / PARTS))
    return kernels.HashMemory(PARTS, slots, max(1, slots // 10), hashes=k)


def partition(record: Recorder) -> None:
    """Algorithm 1 with the paper's parameters, against sorting."""
    host = gradient(0.01)
    indices = jnp.asarray(np.flatnonzero(host), jnp.int32)
    count, seeds = jnp.int32(indices.size), kernels.draw_seeds(4)
    memory = hashed(indices, 3, 2.0)
    say(f"\npartition: {indices.size:,} indices to {PARTS} parts, k = 3, r1 = 2 x")
    ours = by_backend(
        lambda indices, count, seeds, backend: kernels.partition(
            indices, count, seeds, memory, backend=backend
        )
    )
    sides = {
        name: functools.partial(lambda run: run(indices, count, seeds).memory, run)
        for name, run in ours.items()
    }
    for name, run in ours.items():
        done = jax.tree.map(np.asarray, run(indices, count, seeds))
        stored = np.sort(done.memory[done.memory >= 0])
        assert not done.left.any(), name
        assert (stored == np.asarray(indices)).all(), name
    listed = np.asarray(indices)
    if in_cpp := partition_in_cpp(listed, seeds, memory):
        places, left = in_cpp()
        assert left == 0
        assert (np.sort(places[places >= 0]) == listed).all(), "C++"
        sides["C++, two threads"] = in_cpp

    def by_numpy():
        part = hashing.place(listed, seeds[0], PARTS)
        return listed[np.argsort(part, kind="stable")]

    x = jnp.asarray(host)
    before = jax.jit(lambda x: kernels.compact(x, indices.size)[0])
    sides["NumPy hash and sort"] = by_numpy
    sides["compact (before it)"] = lambda: before(x)
    about = {"indices": int(indices.size), "parts": PARTS}
    times = timed(record, "partition", sides, **about)
    if in_cpp:
        ratio = timing.ratios(times, "C++, two threads")["reference"]
        say(f"  {ratio:.1f} times C++ with two threads (to reach: 3)")
