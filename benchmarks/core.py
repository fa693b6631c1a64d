"""Costs of the exact sparse all-reduce: to find the entries, in bytes, to compile.

    python -m benchmarks.core find
    python -m benchmarks.core [bytes] [compile] [--plot]

Prints tables, and writes benchmarks/results/core-*.jsonl. Simulated devices have no
network: bytes and compile times are the results here, not the time of a step.
"""

import dataclasses
import math
import sys
import time

import jax


# Finding is a matter of one device; simulated ones would share its threads.
ALONE = sys.argv[1:2] == ["find"]
if not ALONE:
    jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType, Mesh, PartitionSpec as P  # noqa: E402

import pallas_kernels  # noqa: E402
import sparsejax  # noqa: E402
from benchmarks.harness import figure, settings, table, timing  # noqa: E402
from benchmarks.harness.record import Recorder, say  # noqa: E402
from benchmarks.harness.settings import option  # noqa: E402
from benchmarks.harness.table import Column  # noqa: E402
from sparsejax import schemes  # noqa: E402
from sparsejax.units.dense import Dense  # noqa: E402
from sparsejax.wire.collectives import Wire  # noqa: E402


RANKS = 8
# The densities that are printed, and others that count for the mean and the plot.
PRINTED = (0.001, 0.01, 0.03, 0.1, 0.3, 0.5, 1)
BETWEEN = (0.0005, 0.002, 0.004, 0.007, 0.015, 0.02, 0.05, 0.07, 0.15, 0.2, 0.4, 0.7, 0.9)


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Measures the costs of the exact sparse all-reduce."""

    PROGRAM = "benchmarks.core"
    parts: tuple[str, ...] = option(
        (),
        "find, or bytes and compile, which are the default,",
        positional=True,
        choices=("find", "bytes", "compile"),
    )
    plot: bool = option(False, "draw bytes by density")


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:RANKS]), ("data",), axis_types=(AxisType.Auto,))


def exchange():
    """A compiled exchange by Balanced Parallelism: its total and its traffic."""

    def reduced(x):
        result = schemes.BalancedParallelism()(Dense(x[0]), (), Wire("data"))
        return result.total, result.traffic

    specs = {"in_specs": P("data"), "out_specs": P()}
    return jax.jit(jax.shard_map(reduced, mesh=mesh(), **specs))


def find(record: Recorder) -> None:
    """Finding and packing the non-zeros of 16M floats, against jnp.nonzero."""
    size, density = 1 << 24, 0.01
    rng = np.random.default_rng(0)
    mask = rng.random(size) < density
    x = jnp.asarray(np.where(mask, rng.standard_normal(size), 0), jnp.float32)
    capacity = int(1.25 * mask.sum())

    ours = jax.jit(lambda x: pallas_kernels.compact(x, capacity, backend="reference")[0])
    theirs = jax.jit(lambda x: jnp.nonzero(x, size=capacity, fill_value=size)[0])
    wrong = int((np.asarray(ours(x)) != np.asarray(theirs(x))).sum())
    sides = {"compact": lambda: ours(x), "jnp.nonzero": lambda: theirs(x)}
    times = timing.alternate(sides, 21)
    ratio = timing.ratios(times, "compact")["jnp.nonzero"]
    say(f"\nIndices of the non-zeros of {size:,} floats at {density:.0%}")
    for name, taken in times.items():
        say(f"  {name:12} {timing.spread(taken)}")
    say(f"  {ratio:.1f} times as fast (to reach: 20), {wrong} wrong")
    record.add(
        part="find", size=size, density=density, ratio=ratio, wrong=wrong, seconds=times
    )


def entropy_bytes(size: int, count: int) -> float:
    """The fewest bytes that tell which `count` of `size` units are there."""
    count = min(max(count, 0), size)
    bits = math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)
    return bits / math.log(2) / 8


def sets(size: int, density: float, kind: str, rng) -> np.ndarray:
    """Flags of the units of each rank: drawn alone, equal on all, or by a Zipf law."""
    if kind == "independent":
        return rng.random((RANKS, size)) < density
    if kind == "same":
        return np.broadcast_to(rng.random(size) < density, (RANKS, size))
    # The share of units that draws from a Zipf law hit is the density wanted.
    chance = 1 / (np.arange(size) + 10.0)
    low, high = 0.0, 1e12
    for _ in range(80):
        middle = math.sqrt(max(low, 1e-6) * high)
        hit = -np.expm1(-middle * chance).mean()
        low, high = (middle, high) if hit < density else (low, middle)
    return rng.random((RANKS, size)) < -np.expm1(-high * chance)


def bytes_sent(record: Recorder) -> None:
    """Payload against values and entropy, wire against payload, over densities."""
    size = 4_000_000
    step = exchange()
    say(
        f"\nBytes that one of {RANKS} ranks sends for {size:,} floats, push and pull, in MB"
    )
    for kind in ("independent", "same", "zipf"):
        rows = []
        for density in sorted(PRINTED + BETWEEN):
            rng = np.random.default_rng(3)
            mask = sets(size, density, kind, rng)
            x = np.where(mask, rng.standard_normal((RANKS, size)), 0).astype(np.float32)
            rows.append({"density": density, **measured(step, x, mask)})
            record.add(part="bytes", kind=kind, **rows[-1])
        printed = [row for row in rows if row["density"] in PRINTED]
        table.show(printed, BYTES, f"{kind} sets")
        ratios = [row["wire"] / row["payload"] for row in rows]
        average = float(np.mean(ratios))
        say(
            f"wire over payload: {average:.3f} on average over {len(ratios)} densities "
            f"(to reach: 1.25), {max(ratios):.3f} at worst; "
            f"compiled {step._cache_size()} time"
        )
        record.add(part="bytes", kind=kind, average_wire_over_payload=average)


BYTES = [
    Column("density", "density", ".2%"),
    Column("after", "after", ".2%"),
    Column("values", "values", ".3f", 1e-6),
    Column("entropy", "entropy", ".3f", 1e-6),
    Column("payload", "payload", ".3f", 1e-6),
    Column("x limit", lambda r: r["payload"] / (r["values"] + r["entropy"]), ".3f"),
    Column("wire", "wire", ".3f", 1e-6),
    Column("x payload", lambda r: r["wire"] / r["payload"], ".3f"),
    Column("COO", "coo", ".3f", 1e-6),
    Column("bitmap", "hash_bitmap", ".3f", 1e-6),
    Column("dense", "dense", ".3f", 1e-6),
    Column("#wrong", "wrong", "d"),
]


def measured(step, x, mask) -> dict:
    """Bytes of one step by the library's count, by formulas, and wrong numbers."""
    size = x.shape[1]
    total, traffic = step(x)
    exact = x.astype(np.float64).sum(0)
    room = (RANKS + 2) * np.finfo(np.float32).eps * np.abs(x).astype(np.float64).sum(0)
    wrong = int((np.abs(np.asarray(total) - exact) > room).sum())
    most, union = int(mask.sum(1).max()), int(mask.any(0).sum())
    away = (RANKS - 1) / RANKS
    values = away * 4 * (most + union)
    limit = away * (entropy_bytes(size, most) + entropy_bytes(size, union))
    return {
        "after": union / size,
        "values": values,
        "entropy": limit,
        "payload": float(traffic.payload),
        "wire": float(traffic.wire),
        # The papers' formats: COO both ways, and COO in, hash bitmap out (Zen).
        "coo": 2 * values,
        "hash_bitmap": away * (8 * most + 4 * union + size / 8),
        "dense": float(traffic.dense),
        "wrong": wrong,
    }


def forty_leaves():
    """A model of 40 leaves: two tables, and twelve blocks of three leaves each."""
    words, width, hidden = 20_000, 64, 256
    params = {
        "input_embedding": jnp.ones((words, width)),
        "output_embedding": jnp.ones((words, width)),
        "in": jnp.ones((width, hidden)),
        "out": jnp.ones((hidden, width)),
    }
    for block in range(12):
        params[f"block{block:02}"] = {
            "kernel": jnp.ones((hidden, hidden)),
            "bias": jnp.zeros(hidden),
            "scale": jnp.ones(hidden),
        }

    def loss(params, batch):
        h = params["input_embedding"][batch["tokens"]].mean(1) @ params["in"]
        for block in range(12):
            weights = params[f"block{block:02}"]
            mean, var = h.mean(-1, keepdims=True), h.var(-1, keepdims=True)
            normed = (h - mean) * jax.lax.rsqrt(var + 1e-5) * weights["scale"]
            h = h + jax.nn.gelu(normed @ weights["kernel"] + weights["bias"])
        rows = params["output_embedding"][batch["candidates"]]
        scores = jnp.einsum("bd,bkd->bk", h @ params["out"], rows)
        return -jnp.mean(jax.nn.log_softmax(scores)[:, 0])

    batch = {
        "tokens": jax.ShapeDtypeStruct((8 * RANKS, 8), jnp.int32),
        "candidates": jax.ShapeDtypeStruct((8 * RANKS, 20), jnp.int32),
    }
    return params, loss, batch


def compiling(record: Recorder) -> None:
    """Seconds to trace and compile one leaf, and a step of a model of forty, in turns.

    Functions that JAX keeps traced are traced by the first of each side alone.
    """
    jax.jit(lambda x: x + 1).lower(1.0).compile()
    params, loss, batch = forty_leaves()
    assert len(jax.tree.leaves(params)) == 40

    def leaf(*shape):
        x = jax.ShapeDtypeStruct((RANKS, *shape), jnp.float32)
        return lambda: exchange().lower(x).compile()

    def model(sync):
        tx = optax.chain(sync, optax.adam(1e-3))
        trainer = sparsejax.data_parallel(loss, tx, mesh())
        state = trainer.init(params)
        return lambda: trainer.compiled(state).lower(state, batch).compile()

    # What is compiled, and the most that it is to take, in multiples of the dense step's.
    dense = "40 leaves, dense"
    sides = {
        "one leaf, 1M floats": (lambda: leaf(1 << 20), 0.8),
        "one leaf, 16M floats": (lambda: leaf(1 << 24), 0.8),
        "one leaf, 40,000 rows of 64": (lambda: leaf(40_000, 64), 0.8),
        dense: (lambda: model(sparsejax.dense_sync()), None),
        # Without rules, and with a rule that says that the blocks are dense.
        "40 leaves, zen": (lambda: model(sparsejax.zen_sync()), 3),
        "40 leaves, zen, blocks dense by rule": (
            lambda: model(sparsejax.zen_sync(rules={"block": "dense"})),
            3,
        ),
    }
    taken = {name: [] for name in sides}
    for _ in range(5):
        for name, (make, _) in sides.items():
            compiled = make()
            start = time.perf_counter()
            compiled()
            taken[name].append(time.perf_counter() - start)
    ratios = timing.ratios(taken, dense)
    rows = [
        {
            "what": name,
            "median": float(np.median(taken[name])),
            "ratio": ratios[name],
            "to_reach": most,
            "seconds": taken[name],
        }
        for name, (_, most) in sides.items()
    ]
    for row in rows:
        record.add(part="compile", **row)
    columns = [
        Column("what", "what"),
        Column("s", "median", ".2f"),
        Column("x dense step", "ratio", ".2f"),
        Column("to reach", "to_reach", ".1f"),
    ]
    title = f"Seconds to trace and compile, on {RANKS} simulated devices"
    table.show(rows, columns, title)


def plot(rows: list[dict]) -> None:
    """Draws bytes by density."""
    names = ("wire", "payload", "coo", "hash_bitmap", "dense")
    rows = [r for r in rows if r.get("kind") == "independent" and "wire" in r]
    image, ((axes,),) = figure.panels(size=(6, 4))
    labels = ("ours, wire", "ours, payload", "COO", "COO in, hash bitmap out", "all-reduce")
    for name, label in zip(names, labels, strict=True):
        axes.loglog(
            [r["density"] for r in rows], [r[name] / 1e6 for r in rows], label=label
        )
    axes.set(xlabel="density of one rank's gradient", ylabel="MB sent by one rank")
    axes.set_title(f"4M floats, {RANKS} ranks, independent sets")
    axes.legend()
    lines = [{name: r[name] for name in ("density", *names)} for r in rows]
    figure.save("core-bytes", lines, image)


PARTS = {"find": find, "bytes": bytes_sent, "compile": compiling}


def main(argv: list[str] | None = None) -> None:
    settings = Settings.parse(argv)
    name = "core-find" if ALONE else "core"
    record = Recorder(name, settings.command(), ("part",))
    for part in settings.parts or ("bytes", "compile"):
        PARTS[part](record)
    say(f"\nwritten: {record.write()}")
    if settings.plot:
        plot(record.all_rows())


if __name__ == "__main__":
    main()
