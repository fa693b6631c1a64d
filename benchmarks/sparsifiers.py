"""What sparsifiers cost: to encode, to find a threshold, to decode.

    python -m benchmarks.sparsifiers [encode] [threshold] [decode] [--numbers 16 64 128]

Encoding goes from a vector to its selected indices and values; sizes are in millions of
numbers. Beside this library's sparsifiers stand those that others publish, as they would be
written in JAX: `lax.top_k`, and DGC with a sorted sample and `jnp.nonzero`. Decoding adds
up the messages of n ranks: all entries in one scatter-add, or each message as a dense
vector, all of which are then added up, or each as soon as it is there. What is timed is
checked first. glibc is told to keep memory (benchmarks/README.md), for all sides.

Writes benchmarks/results/sparsifiers-*.jsonl, on a GPU sparsifiers-gpu-*.jsonl, and a plot.
"""

import argparse
import functools
import math
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from benchmarks.record import RESULTS, Recorder, alternate, say, spread
from benchmarks.testbed.job import ALLOCATOR
from sparsejax import sparsifiers
from sparsejax.sparsifiers import base
from sparsejax.sparsifiers.dgc import sampled
from sparsejax.units import magnitudes


DENSITIES = (0.0001, 0.001, 0.01)
RANKS = (2, 4, 8, 16)
REPEATS = 7
MILLION = 1 << 20
# 16 MB: larger arrays glibc returns to the kernel, and each result would be page faults.
DECODED = 4


def draw(size: int, density: float) -> base.Draw:
    """What a sparsifier is told of one step."""
    return base.Draw(jnp.int32(1), jnp.uint32(7), jnp.int32(math.ceil(density * size)))


def encoder(sparsifier: base.Selecting, size: int):
    """From a vector and the sparsifier's state to indices, values and the state."""
    told, room = draw(size, sparsifier.density), sparsifier.capacity(size)

    def encode(x, state):
        found, state = sparsifier.select(x, state, told, room)
        return found, x.at[found].get(mode="fill", fill_value=0), state

    return jax.jit(encode)


def published_top_k(x, density):
    """TopK as `lax.top_k` gives it."""
    _, found = lax.top_k(jnp.abs(x), math.ceil(density * x.size))
    return found, x[found]


def published_dgc(x, density):
    """DGC: the sample sorted, one count, and a prefix sum to get the indices."""
    k, stride = math.ceil(density * x.size), 101
    looked_at = jnp.abs(x[::stride])
    least = lax.top_k(looked_at, max(1, math.ceil(density * looked_at.size)))[0][-1]
    count = jnp.sum(jnp.abs(x) >= least)
    least = jnp.where(
        count > 1.3 * k, least * 1.3, jnp.where(count < 0.8 * k, least * 0.8, least)
    )
    (found,) = jnp.nonzero(jnp.abs(x) >= least, size=math.ceil(1.3 * k), fill_value=x.size)
    return found, x.at[found].get(mode="fill", fill_value=0)


@jax.jit
def one_read(x):
    """What reads a vector once, and writes nothing."""
    return jnp.max(jnp.abs(x))


def sample_of(x, density):
    """DRAGONN's threshold: a sample says."""
    return sampled(x, draw(x.size, density), 0.01, density)


def counted_of(x, density):
    """DGC's: a sample says, and one count says whether it is right."""
    own, told = sparsifiers.DGC(density), draw(x.size, density)
    return own.settled(x, own.level(x, (), told)[0], told)


def wrong_of(x, found, values) -> int:
    """How many entries are not what the vector has, or come twice."""
    found, values, x = (np.asarray(y) for y in (found, values, x))
    used = found < x.size
    twice = used.sum() - np.unique(found[used]).size
    return int(twice + (x[found[used]] != values[used]).sum())


def encode(record: Recorder, numbers: list[int]) -> None:
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
            for name, one in chosen.items():
                run, state = encoder(one, size), one.init(size, x.dtype)
                if name == "reuse_threshold":  # as in a step in which it is not found anew
                    state = magnitudes.magnitude_of(
                        magnitudes.kth_largest(
                            x, draw(size, density).wanted, jnp.uint32(1)
                        ),
                        x.dtype,
                    )
                found, values, _ = run(x, state)
                wrong[name] = wrong_of(x, found, values)
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
            times = alternate(sides, REPEATS)
            say(f"  {million} M numbers, {density:.2%}")
            middle = {name: float(np.median(taken)) for name, taken in times.items()}
            for name, taken in times.items():
                ratio = middle["dragonn"] / middle[name]
                say(f"    {name:16} {spread(taken):34} dragonn / this: {ratio:5.2f}")
                record.add(
                    part="encode",
                    name=name,
                    size=size,
                    density=density,
                    seconds=taken,
                    dragonn_over_this=ratio,
                    wrong=wrong.get(name, 0),
                )
            say(f"    wrong: {sum(wrong.values())}")


def threshold(record: Recorder, numbers: list[int]) -> None:
    """Times to find a threshold, over one read of the vector."""
    say("\nFinding a threshold, over one read of the vector (to reach: 1.5)")
    for million in numbers:
        size = million * MILLION
        x = jax.random.normal(jax.random.key(0), (size,))
        for density in DENSITIES:
            told = draw(size, density)
            sides = {
                "one read": functools.partial(one_read, x),
                "sample": functools.partial(
                    jax.jit(sample_of, static_argnums=1), x, density
                ),
                "sample, counted": functools.partial(
                    jax.jit(counted_of, static_argnums=1), x, density
                ),
                "exact": functools.partial(
                    jax.jit(magnitudes.kth_largest), x, told.wanted, told.seed
                ),
            }
            times = alternate(sides, REPEATS)
            base_time = float(np.median(times["one read"]))
            for name, taken in times.items():
                ratio = float(np.median(taken)) / base_time
                what = f"{million} M, {density:.2%}  {name:16}"
                say(f"  {what} {spread(taken):34} {ratio:.2f}")
                record.add(
                    part="threshold",
                    name=name,
                    size=size,
                    density=density,
                    seconds=taken,
                    over_a_read=ratio,
                )


def decode(record: Recorder, numbers: list[int]) -> None:
    """Times to add up the messages of n ranks, sparsely and densely."""
    del numbers
    size = DECODED * MILLION
    say(f"\nDecoding: messages of n ranks, 0.1% each, a vector of {DECODED} M numbers")
    say("Times, and over those of sparse decoding (to reach at 16 ranks: 16)")
    k = math.ceil(0.001 * size)

    def sparsely(found, values):
        return pallas_kernels.coo_add(found.reshape(-1), values.reshape(-1), size)

    def one_by_one(found, values):
        def one(total, message):
            at, own = message
            return total + jnp.zeros(size).at[at].set(own), None

        return lax.scan(one, jnp.zeros(size), (found, values))[0]

    def all_dense(found, values):
        dense = jax.vmap(lambda at, own: jnp.zeros(size).at[at].set(own))(found, values)
        return jnp.sum(lax.optimization_barrier(dense), axis=0)

    first = None
    for n in RANKS:
        rng = np.random.default_rng(n)
        found = np.stack([rng.choice(size, k, replace=False) for _ in range(n)])
        found = jnp.asarray(found.astype(np.int32))
        values = jnp.asarray(rng.integers(-4, 5, (n, k)).astype(np.float32))
        sides = {
            "sparse": jax.jit(sparsely),
            "dense": jax.jit(all_dense),
            "dense, one by one": jax.jit(one_by_one),
        }
        results = [np.asarray(run(found, values)) for run in sides.values()]
        wrong = sum(int((results[0] != other).sum()) for other in results[1:])
        sides = {name: functools.partial(run, found, values) for name, run in sides.items()}
        times = alternate(sides, REPEATS)
        middle = {name: float(np.median(taken)) for name, taken in times.items()}
        first = first or middle["sparse"]
        growth = middle["sparse"] / first
        ratios = {name: taken / middle["sparse"] for name, taken in middle.items()}
        for name, taken in times.items():
            say(f"  {n:2} ranks  {name:18} {spread(taken):34} {ratios[name]:.1f}")
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


def plot(record: Recorder, name: str) -> None:
    """The encoding times by size and density, as DRAGONN's figure 5(a)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in record.rows if row["part"] == "encode"]
    sizes = sorted({row["size"] for row in rows})
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5))
    for name_of in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name_of]
        middle = lambda row: 1e3 * float(np.median(row["seconds"]))
        by_size = sorted((r["size"], middle(r)) for r in own if r["density"] == 0.001)
        by_density = sorted((r["density"], middle(r)) for r in own if r["size"] == sizes[0])
        axes[0].loglog(*zip(*by_size, strict=True), marker="o", label=name_of)
        axes[1].loglog(*zip(*by_density, strict=True), marker="o")
    axes[0].set(xlabel="numbers", ylabel="ms to encode, density 0.1%")
    axes[1].set(xlabel="density", ylabel=f"ms to encode {sizes[0] >> 20} M numbers")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}-jax{jax.__version__}.png", dpi=120)


PARTS = {"encode": encode, "threshold": threshold, "decode": decode}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sparsifiers", description=__doc__.splitlines()[0]
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all if none")
    parser.add_argument("--numbers", nargs="+", type=int, default=[16], help="millions")
    args = parser.parse_args()
    if not ALLOCATOR.items() <= os.environ.items():
        command = [sys.executable, "-m", "benchmarks.sparsifiers", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **ALLOCATOR})
    parts = args.parts or list(PARTS)
    words = [*args.parts, "--numbers", *map(str, args.numbers)]
    record = Recorder("python -m benchmarks.sparsifiers " + " ".join(words))
    for part in parts:
        PARTS[part](record, args.numbers)
    name = "sparsifiers-gpu" if jax.default_backend() == "gpu" else "sparsifiers"
    record.keep(name, lambda row: row["part"] not in parts)
    if any(row["part"] == "encode" for row in record.rows):
        plot(record, name)
    say(f"written: {record.write(name)}")


if __name__ == "__main__":
    main()
