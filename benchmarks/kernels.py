"""What the kernels cost on this device, by backend and against what one would use instead.

    python -m benchmarks.kernels [compact] [decode] [partition] [memory]

Every result is checked before it is timed; sides take turns. `memory` repeats figure 14 of
Zen: what Algorithm 1 costs by the size of its memory (r1, in indices) and by its number of
hashes (k), with what it takes to read the indices out of that memory again. Writes
benchmarks/results/kernels-*.jsonl, and figure 14 as CSV and PNG.
"""

import argparse
import csv
import ctypes
import functools
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as kernels
from benchmarks.compiled import together
from benchmarks.record import RESULTS, Recorder, alternate, say, spread
from pallas_kernels import backends, hashing, rank_select, reference


SIZE = 1 << 24
PARTS = 16
REPEATS = 11
DENSITIES = (0.01, 0.1, 0.02, 0.05)  # of figure 14: its ends first


def gradient(density: float, size: int = SIZE) -> np.ndarray:
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


def timed(
    record: Recorder, part: str, sides: dict, ours: str = "reference", **about
) -> dict[str, list[float]]:
    """Times sides in turn, returns and tells how many times as long as ours each takes."""
    times = alternate(sides, REPEATS)
    own = times[ours]
    for name, taken in times.items():
        ratio = statistics.median(np.divide(taken, own))
        say(f"  {name:22} {spread(taken):34} {ratio:6.2f} times {ours}")
        record.add(part=part, side=name, seconds=taken, ratio=ratio, **about)
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
        found = np.asarray(sides[name]())
        assert (found[: expected.size] == expected).all(), name
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


def hashed(indices, k: int, memory: float) -> dict:
    """The arguments of Algorithm 1 as in the paper: r1 = memory * indices, r2 = r1 / 10."""
    slots = max(1, round(memory * indices.size / PARTS))
    return {
        "parts": PARTS,
        "slots": slots,
        "serial": max(1, slots // 10),
        "hashes": k,
    }


def partition(record: Recorder) -> None:
    """Algorithm 1 with the paper's parameters, against sorting and against bits."""
    host = gradient(0.01)
    indices = jnp.asarray(np.flatnonzero(host), jnp.int32)
    count, seeds = jnp.int32(indices.size), kernels.draw_seeds(4)
    sizes = hashed(indices, 3, 2.0)
    say(f"\npartition: {indices.size:,} indices to {PARTS} parts, k = 3, r1 = 2 x")
    ours = by_backend(
        lambda indices, count, seeds, backend: kernels.partition(
            indices, count, seeds, backend=backend, **sizes
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
    if in_cpp := partition_in_cpp(listed, seeds, sizes):
        memory, left = in_cpp()
        assert left == 0
        assert (np.sort(memory[memory >= 0]) == listed).all(), "C++"
        sides["C++, two threads"] = in_cpp

    def by_numpy():
        part = hashing.place(listed, seeds[0], PARTS)
        return listed[np.argsort(part, kind="stable")]

    x, capacity = jnp.asarray(host), int(1.1 * indices.size / PARTS)
    both = jax.jit(lambda x: kernels.partition_by_bits(x, parts=PARTS, capacity=capacity))
    found = jax.jit(lambda x: kernels.compact(x, indices.size)[0])
    sides["NumPy hash and sort"] = by_numpy
    sides["compact (before it)"] = lambda: found(x)
    sides["partition_by_bits"] = lambda: both(x).memory
    about = {"indices": int(indices.size), "parts": PARTS}
    times = timed(record, "partition", sides, **about)
    if in_cpp:
        ratio = np.divide(times["reference"], times["C++, two threads"])
        say(f"  {statistics.median(ratio):.1f} times C++ with two threads (to reach: 3)")


def partition_in_cpp(indices: np.ndarray, seeds: np.ndarray, sizes: dict):
    """Algorithm 1 in C++, its memory and how many are left; None without a compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        say("  no C++ compiler: Algorithm 1 in C++ is left out")
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder) / "partition.so"
        source = pathlib.Path(__file__).with_name("partition.cc")
        command = [compiler, "-std=c++20", "-O3", "-march=native", "-shared", "-fPIC"]
        command += ["-pthread", source, "-o", library]
        subprocess.run(command, check=True)
        function = ctypes.CDLL(str(library)).partition
    function.restype = ctypes.c_int64
    room = sizes["slots"] + sizes["serial"]
    memory = np.empty((sizes["parts"], room), np.int32)
    counts = np.empty(sizes["parts"], np.int32)
    seeds = np.ascontiguousarray(seeds, np.uint32)
    at = lambda array: ctypes.c_void_p(array.ctypes.data)
    number = [sizes[name] for name in ("parts", "hashes", "slots", "serial")]

    def run():
        left = function(
            at(indices),
            ctypes.c_int64(indices.size),
            at(seeds),
            *map(ctypes.c_int32, [*number, 2]),
            at(memory),
            at(counts),
        )
        return memory, left

    return run


def memory(
    record: Recorder,
    size: int = SIZE,
    out: pathlib.Path = RESULTS,
    own: Sequence[str] = ("reference",),
    sample: float = 0.1,
) -> None:
    """Figure 14: the cost by r1 at k = 3, and by k at r1 = 2 x, with the reading out."""
    rows = []
    cases = [("r1", m, 3, m) for m in (1.0, 1.5, 2.0, 3.0, 4.0)]
    cases += [("k", k, k, 2.0) for k in (1, 2, 3, 4, 5)]
    seeds = jnp.asarray(kernels.draw_seeds(6))
    for density in DENSITIES:
        indices = jnp.asarray(np.flatnonzero(gradient(density, size)), jnp.int32)
        say(f"\nfigure 14: {size:,} parameters, {density:.0%}, {indices.size:,} indices")
        sides = together(
            {
                (backend, *case): (
                    functools.partial(
                        _read_out, backend=backend, **hashed(indices, *case[2:])
                    ),
                    indices,
                    seeds,
                )
                for case in cases
                for backend in own
            }
        )
        shares = {}
        for (backend, axis, value, k, times), run in sides.items():
            found, serial, left = run()
            assert not left.any() or times < 1.5 or k < 3, "the paper's memory overflows"
            assert _once(indices, found, left), (
                f"{backend}: an index is there twice, or nowhere"
            )
            shares[backend, axis, value, k, times] = float(serial)
        for side, taken in alternate(sides, REPEATS, sample).items():
            backend, axis, value, *_ = side
            row = {"backend": backend, "density": density, "axis": axis, "value": value}
            row |= {"serial": shares[side], "seconds": statistics.median(taken)}
            rows.append(row | {"low": min(taken), "high": max(taken)})
            record.add(part="figure 14", **rows[-1])
            name = f"{backend}, {axis} = {value:g}" + (" x" if axis == "r1" else "")
            say(f"  {name:20} {spread(taken):34} {row['serial']:6.2%} serial")
        _draw(rows, size, out)


def _read_out(indices, seeds, *, backend, **sizes):
    """Algorithm 1, and the indices in the order of the memory."""
    done = kernels.partition(indices, indices.size, seeds, backend=backend, **sizes)
    flat = done.memory.reshape(-1)
    words = rank_select.pack(jnp.pad(flat >= 0, (0, -flat.size % 32)))
    at, _ = reference.bitmap_decode(words, indices.size)
    found = flat.at[at].get(mode="fill", fill_value=-1)
    return found, jnp.sum(done.counts) / indices.size, done.left


@jax.jit
def _once(indices, found, left):
    """Is each index either found or left, once?"""
    highest = jnp.iinfo(jnp.int32).max
    stored = jnp.where(found < 0, highest, found)
    both = jnp.concatenate([stored, jnp.where(left, indices, highest)])
    return (jnp.sort(both)[: indices.size] == indices).all()


def _draw(rows: list[dict], size: int, out: pathlib.Path) -> None:
    stem = out / f"kernels-figure14-{jax.default_backend()}-jax{jax.__version__}"
    with stem.with_suffix(stem.suffix + ".csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    own = list(dict.fromkeys(row["backend"] for row in rows))
    shape = {"figsize": (9, 0.6 + 3 * len(own)), "sharey": True, "squeeze": False}
    figure, axes = plt.subplots(len(own), 2, **shape)
    titles = {"r1": "Memory r1, times the indices (k = 3)", "k": "Hashes k (r1 = 2 x)"}
    for of_backend, backend in zip(axes, own, strict=True):
        for ax, (axis, title) in zip(of_backend, titles.items(), strict=True):
            for density in sorted({row["density"] for row in rows}):
                wanted = {"backend": backend, "axis": axis, "density": density}
                of = [row for row in rows if wanted.items() <= row.items()]
                ax.plot(
                    [row["value"] for row in of],
                    [1e3 * row["seconds"] for row in of],
                    marker="o",
                    label=f"{density:.0%}",
                )
            ax.set_xlabel(title)
            ax.grid(alpha=0.3)
        of_backend[0].set_ylabel(f"{backend}: ms, with reading out")
        of_backend[0].set_ylim(bottom=0)
    axes[0, 1].legend(title="density", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(f"Algorithm 1, {size:,} parameters, {jax.devices()[0].device_kind}")
    figure.tight_layout()
    figure.savefig(f"{stem}.png", dpi=120)
    plt.close(figure)


PARTS_OF_THIS = {
    "compact": compact,
    "decode": decode,
    "partition": partition,
    "memory": memory,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS_OF_THIS))
    chosen = parser.parse_args(argv).parts or list(PARTS_OF_THIS)
    if unknown := set(chosen) - set(PARTS_OF_THIS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    record = Recorder(" ".join(["python -m benchmarks.kernels", *(argv or sys.argv[1:])]))
    say(", ".join(f"{key} {value}" for key, value in record.head.items()))
    for name in chosen:
        PARTS_OF_THIS[name](record)
    measured = {row["part"] for row in record.rows}
    name = f"kernels-{record.head['backend']}"
    record.keep(name, lambda row: row["part"] not in measured)
    say(f"\nwritten: {record.write(name)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
