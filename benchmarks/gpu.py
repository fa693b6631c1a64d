"""Everything that needs a GPU, in one command: are the kernels right, and which is fastest.

    python -m benchmarks.gpu --out DIR [--minutes 8]

In this order, so that what matters most is there if time runs out:

    suite       tests/test_kernels.py on the GPU, every backend that runs there
    contended   1,000 runs of `partition` in a memory that is too small, each checked
    sums        whether scatter-add with repeated indices gives the same bytes twice
    winners     every operation by every backend, 1M, 16M and 214M elements, 1 and 2.8%;
                against copying the array, jnp.nonzero, lax.top_k
    figure14    `benchmarks.kernels memory` at 214M parameters, as in Zen

DIR gets gpu.jsonl, winners.json (to be checked in as pallas_kernels/winners.json), and
figure 14 as CSV and PNG. Without a GPU it says so and ends with status 1; with --any it
runs on whatever there is, at small sizes, to show that it works.
"""

import argparse
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as kernels
from benchmarks import kernels as timings
from benchmarks.record import Recorder, alternate, say, spread
from pallas_kernels import backends, hashing


REPEATS = 7
PARTS = 16


def suite(context) -> bool:
    """The tests of the kernels, on the device."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["tests/test_kernels.py", "tests/test_backends.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=context.left())
    (context.out / "suite.txt").write_text(done.stdout + done.stderr)
    last = done.stdout.strip().splitlines()[-1:] or ["nothing ran"]
    say(f"suite: {last[0]}")
    context.record.add(part="suite", status=done.returncode, summary=last[0])
    return done.returncode == 0


def contended(context) -> bool:
    """Many indices, few slots: who is stored, who waits and who is left is checked."""
    size, wrong = 4096, {}
    sizes = {"parts": 8, "slots": 32, "serial": 16, "hashes": 3}
    for name in context.backends:
        run = jax.jit(functools.partial(kernels.partition, backend=name, **sizes))
        check = jax.jit(functools.partial(_is_whole, sizes=sizes))
        wrong[name] = 0
        for seed in range(context.runs):
            indices = jnp.arange(seed, seed + size, dtype=jnp.int32)
            seeds = kernels.draw_seeds(4, seed)
            done = run(indices, size, seeds)
            wrong[name] += not bool(check(indices, seeds, done))
        say(f"contended, {name}: {wrong[name]} of {context.runs} runs wrong")
    context.record.add(part="contended", runs=context.runs, wrong=wrong)
    return not any(wrong.values())


def _is_whole(indices, seeds, done, *, sizes):
    """Whether each index is stored once in its part, or left; on the device, for speed."""
    memory = done.memory
    stored = jnp.where(memory >= 0, memory, jnp.iinfo(jnp.int32).max).reshape(-1)
    left = jnp.where(done.left, indices, jnp.iinfo(jnp.int32).max)
    found = jnp.sort(jnp.concatenate([stored, left]))[: indices.size]
    part = hashing.place(memory, seeds[0], sizes["parts"])
    own = part == jnp.arange(sizes["parts"])[:, None]
    over = jnp.sum(jnp.maximum(done.counts - sizes["serial"], 0))
    once = (found == jnp.sort(indices)).all()
    return once & (own | (memory < 0)).all() & (over == jnp.sum(done.left))


def sums(context) -> bool:
    """Is a scatter-add with repeated indices the same twice, byte for byte?"""
    rng = np.random.default_rng(0)
    indices = jnp.asarray(rng.integers(0, 1000, 1 << 20), jnp.int32)
    values = jnp.asarray(rng.standard_normal(1 << 20), jnp.float32)
    for name in context.backends:
        try:
            run = jax.jit(functools.partial(kernels.coo_add, size=1000, backend=name))
            seen = {np.asarray(run(indices, values)).tobytes() for _ in range(20)}
        except kernels.BackendError:
            continue
        say(f"sums, {name}: {len(seen)} different results in 20 runs")
        context.record.add(part="sums", backend=name, results=len(seen))
    return True


def winners(context) -> bool:
    """Times by operation, backend and size, and the table of the fastest."""
    table: dict[str, list] = {}
    for size in context.sizes:
        for density in (0.01, 0.028):
            for operation, sides in _sides(context, size, density).items():
                times = alternate(sides, REPEATS, 0.02)
                say(f"\n{operation}: {size:,} elements, {density:.1%}")
                for name, taken in times.items():
                    say(f"  {name:14} {spread(taken)}")
                    context.record.add(
                        part=operation, size=size, density=density, side=name, seconds=taken
                    )
                ours = {n: t for n, t in times.items() if n in backends.BACKENDS}
                best = min(ours, key=lambda name: statistics.median(ours[name]))
                if density == 0.01:
                    table.setdefault(operation, []).append({"size": size, "backend": best})
            if context.left() < 60:
                say("no time left for more sizes")
                break
    kind = jax.devices()[0].device_kind
    (context.out / "winners.json").write_text(json.dumps({kind: table}, indent=2) + "\n")
    return True


def _sides(context, size, density):
    """For each operation the functions to time, on the same data."""
    host = timings.gradient(density, size)
    x = jnp.asarray(host)
    count = int(np.count_nonzero(host))
    capacity = int(1.1 * count)
    indices = jnp.asarray(np.flatnonzero(host), jnp.int32)
    words = kernels.bitmap_encode(x, backend="reference")
    seeds = kernels.draw_seeds(4)
    slots = 2 * count // PARTS
    of = functools.partial
    calls = {
        "compact": (of(kernels.compact, capacity=capacity), (x,)),
        "bitmap_encode": (kernels.bitmap_encode, (x,)),
        "bitmap_decode": (of(kernels.bitmap_decode, capacity=capacity), (words,)),
        "partition": (
            of(kernels.partition, parts=PARTS, slots=slots, serial=max(1, slots // 10)),
            (indices, count, seeds),
        ),
        "partition_by_bits": (
            of(kernels.partition_by_bits, parts=PARTS, capacity=capacity // PARTS),
            (x,),
        ),
        "threshold_hash": (
            of(kernels.threshold_hash, threshold=0.5, seed=7, slots=2 * count),
            (x,),
        ),
        "coo_add": (of(kernels.coo_add, size=size), (indices, jnp.ones(count))),
    }
    found = {}
    for operation, (function, operands) in calls.items():
        found[operation] = {}
        for name in context.backends:
            run = jax.jit(of(function, backend=name))
            try:
                jax.block_until_ready(run(*operands))
            except kernels.BackendError:
                continue  # This operation has no such kernel.
            found[operation][name] = of(run, *operands)
    copy = jax.jit(lambda x: x + 1)
    found["compact"]["copy"] = of(copy, x)
    if size <= 1 << 24:
        nonzero = jax.jit(of(jnp.nonzero, size=capacity, fill_value=size))
        found["compact"]["jnp.nonzero"] = of(nonzero, x)
        top = jax.jit(lambda x: jax.lax.top_k(jnp.abs(x), count)[1])
        found["threshold_hash"]["top_k"] = of(top, x)
    return found


def figure14(context) -> bool:
    """Algorithm 1's cost by memory and number of hashes."""
    timings.memory(context.record, context.sizes[-1], context.out)
    return True


class Context:
    """What the parts share."""

    def __init__(self, options, record):
        self.out, self.record = options.out, record
        self._end = time.monotonic() + 60 * options.minutes
        gpu = jax.default_backend() == "gpu"
        self.sizes = (1 << 20, 1 << 24, 214_000_000) if gpu else (1 << 14, 1 << 16)
        self.runs = 1000 if gpu else 5
        self.backends = [n for n in backends.BACKENDS if backends.why_not(n) is None]

    def left(self) -> float:
        """Seconds until it should have ended."""
        return max(5.0, self._end - time.monotonic())


PARTS_OF_THIS = (suite, contended, sums, winners, figure14)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--minutes", type=float, default=8, help="(%(default)s)")
    parser.add_argument("--any", action="store_true", help="run without a GPU too")
    options = parser.parse_args(argv)
    if jax.default_backend() != "gpu" and not options.any:
        say(f"JAX sees no GPU here, only {jax.default_backend()}; --any runs all the same.")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    record = Recorder("python -m benchmarks.gpu")
    record.head["device"] = jax.devices()[0].device_kind
    say(", ".join(f"{key} {value}" for key, value in record.head.items()))
    context = Context(options, record)
    for name in backends.BACKENDS:
        say(f"{name}: {backends.why_not(name) or 'runs'}")
    well = True
    for part in PARTS_OF_THIS:
        try:
            well &= part(context)
        except Exception as error:
            # What was measured before is worth keeping.
            say(f"{part.__name__} failed: {type(error).__name__}: {str(error)[:500]}")
            record.add(part=part.__name__, failed=str(error)[:2000])
            well = False
        rows = [record.head, *record.rows]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (options.out / "gpu.jsonl").write_text(lines)
    say(f"\n{'all well' if well else 'NOT WELL'}; written: {options.out}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
