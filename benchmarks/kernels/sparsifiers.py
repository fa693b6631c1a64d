"""Costs of sparsifiers: to encode, to find a threshold, to decode.

    python -m benchmarks.kernels.sparsifiers [encode] [threshold] [decode] [--numbers 16 64]

Encoding makes selected indices and values of a vector; sizes are in millions of numbers.
Beside this library's sparsifiers stand those that others publish, as they would be written
in JAX: `lax.top_k`, and DGC with a sorted sample and `jnp.nonzero`. Decoding adds up the
messages of n ranks: all entries in one scatter-add, or each message as a dense vector, all
of which are then added up, or each as soon as it is there. Results are checked before they
are timed. glibc is told to keep memory (benchmarks/testbed/README.md), for all sides.

Writes benchmarks/results/sparsifiers-*.jsonl, on a GPU sparsifiers-gpu-*.jsonl, and a plot.
"""

import dataclasses
import functools
import math
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harness import figure, settings, timing
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.testbed.job import ALLOCATOR
from sparsejax import sparsifiers
from sparsejax.sparsifiers import base
from sparsejax.sparsifiers.by_estimate.dgc import sampled
from sparsejax.units.selection import magnitudes


DENSITIES = (0.0001, 0.001, 0.01)
RANKS = (2, 4, 8, 16)
REPEATS = 7
MILLION = 1 << 20
# 16 MB: larger arrays glibc returns to the kernel, and each result would be page faults.
DECODED = 4


def draw(size: int, density: float) -> base.Draw:
    """The draw of a sparsifier's first step."""
    return base.Draw(jnp.int32(1), jnp.uint32(7), jnp.int32(math.ceil(density * size)))


def encoder(sparsifier: base.Selector, size: int):
    """A function of a vector and a state that returns indices, values and the state."""
    drawn, capacity = draw(size, sparsifier.density), sparsifier.capacity(size)

    def encode(x, state):
        indices, state = sparsifier.select(x, state, drawn, capacity)
        return indices, x.at[indices].get(mode="fill", fill_value=0), state

    return jax.jit(encode)


def published_top_k(x, density):
    """TopK as `lax.top_k` gives it."""
    _, indices = lax.top_k(jnp.abs(x), math.ceil(density * x.size))
    return indices, x[indices]


def published_dgc(x, density):
    """DGC: the sample sorted, one count, and a prefix sum to get the indices."""
    k, stride = math.ceil(density * x.size), 101
    sample = jnp.abs(x[::stride])
    least = lax.top_k(sample, max(1, math.ceil(density * sample.size)))[0][-1]
    count = jnp.sum(jnp.abs(x) >= least)
    least = jnp.where(
        count > 1.3 * k, least * 1.3, jnp.where(count < 0.8 * k, least * 0.8, least)
    )
    above = jnp.abs(x) >= least
    (indices,) = jnp.nonzero(above, size=math.ceil(1.3 * k), fill_value=x.size)
    return indices, x.at[indices].get(mode="fill", fill_value=0)


@jax.jit
def one_read(x):
    """Reads a vector once, and writes nothing."""
    return jnp.max(jnp.abs(x))


def sample_of(x, density):
    """DRAGONN's threshold, from a sample."""
    return sampled([x], [draw(x.size, density)], 0.01, density)[0]


def counted_of(x, density):
    """DGC's threshold, from a sample and checked by one count."""
    sparsifier, drawn = sparsifiers.DGC(density), draw(x.size, density)
    return sparsifier.settled(x, sparsifier.level(x, (), drawn)[0], drawn)


def wrong_of(x, indices, values) -> int:
    """The number of entries whose values are wrong, or whose indices come twice."""
    indices, values, x = (np.asarray(y) for y in (indices, values, x))
    used = indices < x.size
    twice = used.sum() - np.unique(indices[used]).size
    return int(twice + (x[indices[used]] != values[used]).sum())


def encode(record: Recorder, numbers: tuple[int, ...]) -> None:
    """Times to encode, of all sparsifiers in turn."""
    say("\nEncoding: from a vector to indices and values")
    for million in numbers:
        size = million * MILLION
        x = jax.random.normal(jax.random.key(0), (size,))
        for density in DENSITIES:
            few = million > 16 or density < 0.001
            chosen = {
                "dragonn": sparsifiers.Dragonn(density),
                "dgc": sparsifiers.DGC(density),
                "top_k": sparsifiers.TopK(density),
                "reuse_threshold": sparsifiers.ReuseThreshold(density),
                "gaussian_k": sparsifiers.GaussianK(density),
                "ms_top_k": sparsifiers.MSTopK(density),
                "random_k": sparsifiers.RandomK(density),
            }
            if few:
                chosen = {name: chosen[name] for name in ("dragonn", "dgc", "top_k")}
            sides, wrong = {}, {}
            for name, sparsifier in chosen.items():
                run, state = encoder(sparsifier, size), sparsifier.init(size, x.dtype)
                if name == "reuse_threshold":  # as in a step in which it is not found anew
                    state = magnitudes.magnitude_of(
                        magnitudes.kth_largest(
                            x, draw(size, density).wanted, jnp.uint32(1)
                        ),
                        x.dtype,
                    )
                indices, values, _ = run(x, state)
                wrong[name] = wrong_of(x, indices, values)
                sides[name] = functools.partial(run, x, state)
            for name, run in (
                ("lax.top_k", published_top_k),
                ("dgc by nonzero", published_dgc),
            ):
                if name == "lax.top_k" and few and jax.default_backend() == "cpu":
                    continue  # a minute a call
                run = jax.jit(run, static_argnums=1)
                wrong[name] = wrong_of(x, *run(x, density))
                sides[name] = functools.partial(run, x, density)
            sides["one read"] = functools.partial(one_read, x)
            times = timing.alternate(sides, REPEATS)
            say(f"  {million} M numbers, {density:.2%}")
            medians = {name: float(np.median(taken)) for name, taken in times.items()}
            ratios = {name: medians["dragonn"] / taken for name, taken in medians.items()}
            timing.show(times, ratios, "dragonn / this")
            for name, taken in times.items():
                record.add(
                    part="encode",
                    name=name,
                    size=size,
                    density=density,
                    seconds=taken,
                    dragonn_over_this=ratios[name],
                    wrong=wrong.get(name, 0),
                )
            say(f"    wrong: {sum(wrong.values())}")


def threshold(record: Recorder, numbers: tuple[int, ...]) -> None:
    """Times to find a threshold, over one read of the vector."""
    say("\nFinding a threshold, over one read of the vector (to reach: 1.5)")
    for million in numbers:
        size = million * MILLION
        x = jax.random.normal(jax.random.key(0), (size,))
        for density in DENSITIES:
            drawn = draw(size, density)
            sides = {
                "one read": functools.partial(one_read, x),
                "sample": functools.partial(
                    jax.jit(sample_of, static_argnums=1), x, density
                ),
                "sample, counted": functools.partial(
                    jax.jit(counted_of, static_argnums=1), x, density
                ),
                "exact": functools.partial(
                    jax.jit(magnitudes.kth_largest), x, drawn.wanted, drawn.seed
                ),
            }
            times = timing.alternate(sides, REPEATS)
            read = float(np.median(times["one read"]))
            ratios = {name: float(np.median(taken)) / read for name, taken in times.items()}
            say(f"  {million} M numbers, {density:.2%}")
            timing.show(times, ratios, "times one read")
            for name, taken in times.items():
                record.add(
                    part="threshold",
                    name=name,
                    size=size,
                    density=density,
                    seconds=taken,
                    over_a_read=ratios[name],
                )


def decode(record: Recorder, numbers: tuple[int, ...]) -> None:
    """Times to add up the messages of n ranks, sparsely and densely."""
    del numbers
    size = DECODED * MILLION
    say(f"\nDecoding: messages of n ranks, 0.1% each, a vector of {DECODED} M numbers")
    say("Times, and over those of sparse decoding (to reach at 16 ranks: 16)")
    k = math.ceil(0.001 * size)

    def dense(indices, values):
        return jnp.zeros(size).at[indices].set(values)

    def sparsely(indices, values):
        return jnp.zeros(size).at[indices.reshape(-1)].add(values.reshape(-1))

    def one_by_one(indices, values):
        add = lambda total, message: (total + dense(*message), None)
        return lax.scan(add, jnp.zeros(size), (indices, values))[0]

    def all_dense(indices, values):
        vectors = lax.optimization_barrier(jax.vmap(dense)(indices, values))
        return jnp.sum(vectors, axis=0)

    of_two_ranks = None
    for n in RANKS:
        rng = np.random.default_rng(n)
        indices = np.stack([rng.choice(size, k, replace=False) for _ in range(n)])
        indices = jnp.asarray(indices.astype(np.int32))
        values = jnp.asarray(rng.integers(-4, 5, (n, k)).astype(np.float32))
        sides = {
            "sparse": jax.jit(sparsely),
            "dense": jax.jit(all_dense),
            "dense, one by one": jax.jit(one_by_one),
        }
        results = [np.asarray(run(indices, values)) for run in sides.values()]
        wrong = sum(int((results[0] != other).sum()) for other in results[1:])
        sides = {
            name: functools.partial(run, indices, values) for name, run in sides.items()
        }
        times = timing.alternate(sides, REPEATS)
        medians = {name: float(np.median(taken)) for name, taken in times.items()}
        of_two_ranks = of_two_ranks or medians["sparse"]
        growth = medians["sparse"] / of_two_ranks
        ratios = {name: taken / medians["sparse"] for name, taken in medians.items()}
        say(f"  {n:2} ranks")
        timing.show(times, ratios, "times sparse")
        say(
            f"            sparse is {growth:.2f} of two ranks' (to reach: 1); {wrong} wrong"
        )
        record.add(
            part="decode",
            ranks=n,
            size=size,
            entries=k,
            over_sparse=ratios,
            over_two_ranks=growth,
            wrong=wrong,
            seconds=times,
        )


def plot(rows: list[dict], name: str) -> None:
    """The encoding times by size and density, as DRAGONN's figure 5(a)."""
    rows = [row for row in rows if row["part"] == "encode"]
    if not rows:
        return
    sizes = sorted({row["size"] for row in rows})
    image, ((by_size, by_density),) = figure.panels(1, 2)
    median = lambda row: 1e3 * float(np.median(row["seconds"]))
    for side in dict.fromkeys(row["name"] for row in rows):
        of_side = [row for row in rows if row["name"] == side]
        points = sorted((r["size"], median(r)) for r in of_side if r["density"] == 0.001)
        by_size.loglog(*zip(*points, strict=True), marker="o", label=side)
        points = sorted((r["density"], median(r)) for r in of_side if r["size"] == sizes[0])
        by_density.loglog(*zip(*points, strict=True), marker="o")
    by_size.set(xlabel="numbers", ylabel="ms to encode, density 0.1%")
    by_density.set(xlabel="density", ylabel=f"ms to encode {sizes[0] >> 20} M numbers")
    by_size.legend(fontsize=7)
    figure.save(name, figure=image)


PARTS = {"encode": encode, "threshold": threshold, "decode": decode}


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Times sparsifiers."""

    PROGRAM = "benchmarks.kernels.sparsifiers"
    parts: tuple[str, ...] = option(
        (), "all if none,", positional=True, choices=tuple(PARTS)
    )
    numbers: tuple[int, ...] = option((16,), "sizes of the vector, in millions")


def main(argv: list[str] | None = None) -> None:
    settings = Settings.parse(argv)
    if not ALLOCATOR.items() <= os.environ.items():
        command = [sys.executable, "-m", Settings.PROGRAM, *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **ALLOCATOR})
    name = "sparsifiers-gpu" if jax.default_backend() == "gpu" else "sparsifiers"
    record = Recorder(name, settings.command(), ("part",))
    for part in settings.parts or PARTS:
        PARTS[part](record, settings.numbers)
    plot(record.all_rows(), name)
    say(f"written: {record.write()}")


if __name__ == "__main__":
    main()
