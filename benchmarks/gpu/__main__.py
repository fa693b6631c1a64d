"""Everything that needs a GPU, in one command: are the kernels right, and which is fastest.

    python -m benchmarks.gpu --out DIR [--minutes 8] [--parts winners figure14]

It needs pytest and hypothesis, and is faster with pytest-xdist.

    suite       tests/test_kernels.py on the GPU, every backend that runs there
    contended   1,000 runs of `partition` and `partition_dense` in memories that are too
                small, each checked on the device
    winners     every operation by every backend, its results compared with the reference's;
                214M, 16M and 1M elements, 2.8 and 1%; against reading the array, copying
                it, jnp.nonzero, lax.top_k; and the ratios that were to be reached
    sums        whether scatter-add with repeated indices gives the same bytes twice
    figure14    `benchmarks.kernels memory` at 214M parameters, as in Zen

Each part is a process of its own, in this order, so that neither a fault on the device nor
a part that takes too long loses what the others measured. DIR gets gpu.jsonl, winners.json
(to be checked in as pallas_kernels/winners.json), and figure 14 as CSV and PNG; all are
written as soon as there is anything in them. Without a GPU it says so and ends with status
1; with --any it runs on whatever there is, at small sizes, to show that it works.
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import pathlib
import signal
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
# Seconds that a part may take at most, of those that are left.
MOST = {"suite": 200, "contended": 60, "winners": 240, "sums": 30, "figure14": 180}


class Context:
    """What a part has: where it writes, and how much of everything there is to do."""

    def __init__(self, out: pathlib.Path, part: str):
        self.out = out
        self.gpu = jax.default_backend() == "gpu"
        self.sizes = (214_000_000, 1 << 24, 1 << 20) if self.gpu else (1 << 16, 1 << 14)
        self.runs = 1000 if self.gpu else 5
        self.backends = [n for n in backends.BACKENDS if backends.why_not(n) is None]
        self.record = Kept(out / f"{part}.jsonl")


class Kept(Recorder):
    """A recorder whose rows are in a file at once."""

    def __init__(self, path: pathlib.Path):
        super().__init__("python -m benchmarks.gpu")
        self._path = path
        self.head["device"] = jax.devices()[0].device_kind

    def add(self, **row) -> None:
        super().add(**row)
        lines = "".join(json.dumps(row) + "\n" for row in (self.head, *self.rows))
        self._path.write_text(lines)


def suite(context) -> bool:
    """The tests of the kernels, on the device."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # That Pallas' Triton backend is deprecated is known, and warnings are errors in tests.
    command += ["-W", "ignore::DeprecationWarning", "--optimized"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "8"]  # Most of the time is XLA's, on the processor.
    command += ["tests/test_kernels.py", "tests/test_backends.py"]
    if not context.gpu:
        command += ["-k", "bad_arguments"]  # The rest runs there as part of all tests.
    with (context.out / "suite.txt").open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
    told = (context.out / "suite.txt").read_text().strip().splitlines()
    last = told[-1] if told else "nothing ran"
    say(last)
    context.record.add(part="suite", status=done.returncode, summary=last)
    return done.returncode == 0


def contended(context) -> bool:
    """Many indices, few slots: who is stored, who waits and who is left is checked."""
    size = 1 << 18 if context.gpu else 4096
    sizes = {"parts": 8, "slots": size // 16, "serial": size // 64, "hashes": 3}
    check = jax.jit(functools.partial(_is_whole, sizes=sizes))
    wrong = {}
    for name in context.backends:
        run = jax.jit(functools.partial(kernels.partition, backend=name, **sizes))
        run_dense = functools.partial(kernels.partition_dense, backend=name, **sizes)
        run_dense = jax.jit(run_dense)
        wrong[name] = 0
        for seed in range(context.runs):
            indices = jnp.arange(seed, seed + size, dtype=jnp.int32)
            seeds = kernels.draw_seeds(4, seed)
            wrong[name] += not bool(check(indices, seeds, run(indices, size, seeds)))
            if name != "pallas":  # It has no such kernel.
                done = run_dense(jnp.ones(size), seeds)
                left = timings.rank_select.unpack(done.left)[:size]
                done = done._replace(left=left)
                wrong[name] += not bool(check(jnp.arange(size), seeds, done))
        say(f"{name}: {wrong[name]} of {context.runs} runs wrong")
    context.record.add(part="contended", runs=context.runs, wrong=wrong)
    return not any(wrong.values())


def _is_whole(indices, seeds, done, *, sizes):
    """The laws of `tests.kernel_contract` but the last, on the device, for speed."""
    parts, slots, serial = (sizes[name] for name in ("parts", "slots", "serial"))
    memory, left = done.memory, done.left
    there = memory >= 0
    highest = jnp.iinfo(jnp.int32).max
    stored = jnp.where(there, memory, highest).reshape(-1)
    found = jnp.sort(jnp.concatenate([stored, jnp.where(left, indices, highest)]))
    once = (found[: indices.size] == jnp.sort(indices)).all()
    once &= jnp.sum(there) + jnp.sum(left) == indices.size
    number = jnp.arange(parts)[:, None]
    own = (hashing.place(memory, seeds[0], parts) == number) | ~there
    slot = jnp.arange(slots)
    legal = ~there[:, :slots]
    for k in range(1, sizes["hashes"] + 1):
        legal |= hashing.place(memory[:, :slots], seeds[k], slots) == slot
    held = jnp.minimum(done.counts, serial)[:, None]
    prefix = there[:, slots:] == (jnp.arange(serial) < held)
    over = (hashing.place(indices, seeds[0], parts) == number) & left
    exact = jnp.sum(over, axis=1) == done.counts - held[:, 0]
    return once & own.all() & legal.all() & prefix.all() & exact.all()


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
        say(f"{name}: {len(seen)} different results in 20 runs")
        context.record.add(part="sums", backend=name, results=len(seen))
    return True


def winners(context) -> bool:
    """Times by operation, backend and size, and the table of the fastest."""
    table: dict[str, dict[int, str]] = {}
    well = True
    for size in context.sizes:
        for density in (0.028, 0.01):
            for operation, (over, sides) in _sides(context, size, density).items():
                times, wrong = _timed(operation, sides)
                well &= not wrong
                say(f"\n{operation}: {size:,} elements, {density:.1%}")
                for name, why in wrong.items():
                    say(f"  {name:20} WRONG: {why}")
                for name, taken in times.items():
                    say(f"  {name:20} {spread(taken)}")
                    context.record.add(
                        part=operation, size=size, density=density, side=name, seconds=taken
                    )
                ours = {n: t for n, t in times.items() if n in backends.BACKENDS}
                if density == 0.01 and ours:
                    best = min(ours, key=lambda name: statistics.median(ours[name]))
                    table.setdefault(operation, {})[over] = best
                _write_winners(context, table)
    _targets(context)
    return well


def _timed(operation, sides):
    """Seconds of the sides that run and agree with the reference, and what is wrong."""
    right, wrong, expected = {}, {}, None
    for name, run in sides.items():
        try:
            result = jax.block_until_ready(run())
        except kernels.BackendError:
            continue  # This operation has no such kernel.
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        if name in backends.BACKENDS:
            told = _summary(operation, result)
            expected = told if expected is None else expected
            if not np.allclose(told, expected, rtol=1e-5):
                wrong[name] = f"{told} where the reference has {expected}"
                continue
        right[name] = run
    return alternate(right, REPEATS, 0.02), wrong


def _summary(operation, result):
    """What all backends must agree on, however their threads went."""
    if operation in ("partition", "partition_dense", "partition_by_bits"):
        there = result.memory >= 0
        stored = jnp.sum(jnp.where(there, result.memory, 0).astype(jnp.float32))
        return [float(stored), int(jnp.sum(there))]
    if operation == "threshold_hash":
        return [int(jnp.sum(result >= 0))]
    return [float(jnp.sum(one.astype(jnp.float32))) for one in jax.tree.leaves(result)]


def _write_winners(context, table):
    rows = {
        operation: [{"size": size, "backend": best[size]} for size in sorted(best)]
        for operation, best in table.items()
    }
    kind = jax.devices()[0].device_kind
    (context.out / "winners.json").write_text(json.dumps({kind: rows}, indent=2) + "\n")


def _sides(context, size, density):
    """For each operation how much it goes over, and what to time on the same data."""
    host = timings.gradient(density, size)
    x = jnp.asarray(host)
    count = int(np.count_nonzero(host))
    capacity = int(1.1 * count)
    indices = jnp.asarray(np.flatnonzero(host), jnp.int32)
    words = kernels.bitmap_encode(x, backend="reference")
    seeds = kernels.draw_seeds(4)
    slots = 2 * count // PARTS
    of = functools.partial
    room = {"parts": PARTS, "slots": slots, "serial": max(1, slots // 10)}
    calls = {
        "compact": (of(kernels.compact, capacity=capacity), (x,)),
        "partition_dense": (of(kernels.partition_dense, **room), (x, seeds)),
        "bitmap_encode": (kernels.bitmap_encode, (x,)),
        "bitmap_decode": (of(kernels.bitmap_decode, capacity=capacity), (words,)),
        "partition": (of(kernels.partition, **room), (indices, count, seeds)),
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
        # What `backends.run` takes for the size is that of the first operand.
        found[operation] = (
            operands[0].size,
            {
                name: of(jax.jit(of(function, backend=name)), *operands)
                for name in context.backends
            },
        )
    append = of(kernels.partition, parts=PARTS, slots=0, hashes=0, serial=slots)
    copy, read = jax.jit(lambda x: x + 1), jax.jit(jnp.sum)
    for name in context.backends:
        run = of(jax.jit(of(append, backend=name)), indices, count, seeds)
        found["partition"][1][f"append, {name}"] = run
    found["compact"][1].update({"copy": of(copy, x), "read": of(read, x)})
    if size <= 1 << 24:
        nonzero = jax.jit(of(jnp.nonzero, size=capacity, fill_value=size))
        found["compact"][1]["jnp.nonzero"] = of(nonzero, x)
        top = jax.jit(lambda x: jax.lax.top_k(jnp.abs(x), count)[1])
        found["threshold_hash"][1]["top_k"] = of(top, x)
    return found


def _targets(context) -> None:
    """The fastest backend of an operation over something else, at the largest size."""
    rows = [row for row in context.record.rows if "side" in row and "size" in row]

    def median(operation, sides, size):
        found = [
            statistics.median(row["seconds"])
            for row in rows
            if row["part"] == operation
            and row["side"] in sides
            and (row["size"], row["density"]) == (size, 0.028)
        ]
        return min(found, default=float("nan"))

    ours, large, medium = backends.BACKENDS, context.sizes[0], context.sizes[1]
    read = median("compact", ["read"], large)
    for name, ratio, aim in (
        ("compact over one read", median("compact", ours, large) / read, 1.43),
        (
            "partition_dense over one read",
            median("partition_dense", ours, large) / read,
            1.43,
        ),
        (
            "compact over jnp.nonzero",
            median("compact", ours, medium) / median("compact", ["jnp.nonzero"], medium),
            1 / 5,
        ),
        (
            "Algorithm 1 by a kernel over by XLA",
            median("partition", ours[1:], large) / median("partition", ours[:1], large),
            1,
        ),
        (
            "threshold_hash over top_k",
            median("threshold_hash", ours, medium)
            / median("threshold_hash", ["top_k"], medium),
            0.3,
        ),
    ):
        if math.isnan(ratio):
            say(f"{name}: not measured")
            continue
        say(f"{name}: {ratio:.3g} (to reach: at most {aim:.3g})")
        context.record.add(part="targets", name=name, ratio=ratio, aim=aim)


def figure14(context) -> bool:
    """Algorithm 1's cost by memory and number of hashes."""
    # On a GPU XLA takes 5 s to compile each of ten cases for each density.
    densities = (0.01, 0.1) if context.gpu else timings.DENSITIES
    size = max(context.sizes[0], 1 << 20)
    timings.memory(context.record, size, context.out, densities)
    return True


PARTS_OF_THIS = (suite, contended, winners, sums, figure14)


def one_part(name: str, out: pathlib.Path) -> int:
    """Runs a part in this process."""
    context = Context(out, name)
    try:
        well = {part.__name__: part for part in PARTS_OF_THIS}[name](context)
    except Exception as error:
        say(f"{name} failed: {type(error).__name__}: {str(error)[:500]}")
        context.record.add(part=name, failed=str(error)[:2000])
        well = False
    return 0 if well else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--minutes", type=float, default=8, help="(%(default)s)")
    parser.add_argument("--any", action="store_true", help="run without a GPU too")
    parser.add_argument("--parts", nargs="*", choices=list(MOST), default=list(MOST))
    parser.add_argument("--one", choices=list(MOST), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        return one_part(options.one, options.out)
    # This process leaves the device to the others.
    told = "import jax; print(jax.default_backend())"
    seen = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True)
    if seen.stdout.strip() != "gpu" and not options.any:
        say(f"JAX sees no GPU here, only {seen.stdout.strip()}; --any runs all the same.")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    missed, lines = [], []
    for name in options.parts:
        say(f"\n== {name}")
        command = [sys.executable, "-m", "benchmarks.gpu", "--out", options.out]
        most = max(5.0, min(MOST[name], end - time.monotonic()))
        part = subprocess.Popen(
            [*command, "--one", name], env=environment, start_new_session=True
        )
        try:
            missed += [name] if part.wait(most) else []
        except subprocess.TimeoutExpired:
            # With all that it started: nothing may run beside the next part.
            os.killpg(part.pid, signal.SIGKILL)
            part.wait()
            say(f"{name} was stopped after {most:.0f} s")
            missed.append(name)
        written = options.out / f"{name}.jsonl"
        if written.exists():
            rows = written.read_text().splitlines()
            lines += rows[1:] if lines else rows
            written.unlink()
        (options.out / "gpu.jsonl").write_text("\n".join(lines) + "\n")
    say(f"\n{'NOT WELL: ' + ', '.join(missed) if missed else 'all well'}; in {options.out}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
