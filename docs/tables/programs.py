"""Tables of what selects, of kernels and of compiling, for performance_tables.md.

Each section is a function that returns a title, what it says, a table, and its file.
"""

import itertools
import statistics

from recorded import Results, digits, seconds, spread, table, times

from benchmarks.charts import programs as charts
from benchmarks.charts.chart import named
from benchmarks.charts.selecting import LIMITED, UNLIMITED
from benchmarks.gpu.steps import counted_with


def selecting():
    results = Results("choosing-network-jax0.10.2")
    rows = []
    for hosts, rate in (*LIMITED, *UNLIMITED):
        for row in results.where(hosts=hosts, rate=rate):
            mean = statistics.mean(row["seconds"])
            sent = digits(row["sent"] / 1e6, 2)
            rows.append([hosts, named(rate), row["scheme"], f"{1e3 * mean:,.0f}", sent])
    text = """Mean milliseconds to select and add up 1% of 4M numbers, and the MB that a
host sends. All hosts share two cores, so work is a large part of it; at 100 Gbit/s it is
all of it."""
    head = ["hosts", "rate", "system", "ms", "MB sent"]
    return "Selecting while reducing: Ok-Topk, SparDL", text, table(head, rows, 3), results


def accuracy():
    results = Results("choosing-training-jax0.10.2")
    rows, losses = [], {}
    of = {"part": "convergence", "optimizer": "momentum", "steps": 200}
    for row in results.where(task="digits", **of):
        other = results.where(task="text", name=row["name"], **of)
        loss = spread(other[0]["loss"], 3) if other else ""
        losses[row["name"]] = other[0]["loss"]
        sent = f"{row['wire_bytes']:,.0f}"
        rows.append([row["name"], spread(row["accuracy"], 4), sent, loss])
    dense = statistics.mean(losses.pop("dense"))
    far = [(statistics.mean(x) - dense) / statistics.pstdev(x) for x in losses.values()]
    text = f"""200 steps with 1% of the gradient and a momentum of 0.9, four ranks, three
seeds: mean and standard deviation. After these few steps none reaches dense: on text they
are {min(far):.1f} to {max(far):.1f} of their own deviations above it. What to do about that
is in [Dense gradients](dense.md)."""
    head = ["system", "digits, accuracy", "bytes a step", "text, loss"]
    return "Training with systems that select", text, table(head, rows), results


def accuracy_of_sparsifiers():
    results = Results("sparse-training-jax0.10.2")
    rows = []
    digits_of = {r["name"]: spread(r["accuracy"], 3) for r in results.where(part="digits")}
    for row in results.where(part="text"):
        name = row["name"]
        rows.append([name, digits_of.get(name, ""), spread(row["loss"], 2)])
    text = """300 steps with 1% of the gradient, four ranks, three seeds: test accuracy
on digits, and loss on other text of a language model."""
    head = ["sparsifier", "digits, accuracy", "text, loss"]
    return "Training with sparsifiers", text, table(head, rows), results


def encoding():
    results = Results("sparsifiers-jax0.10.2")
    rows = []
    for size, density in itertools.product((1 << 24, 1 << 27), (0.001, 0.01)):
        for name in ("dragonn", "dgc", "top_k", "dgc by nonzero", "one read"):
            row = results.one(part="encode", name=name, size=size, density=density)
            ms = digits(1e3 * seconds(row), 2)
            over = f"{row['dragonn_over_this']:.2f}"
            rows.append([f"{size >> 20} M, {density:.1%}", name, ms, over])
    text = """Milliseconds to select from a vector of normally distributed numbers on
two cores, and DRAGONN's time over it. `dgc by nonzero` is DGC as it is published."""
    head = ["numbers, density", "sparsifier", "ms", "DRAGONN over it"]
    return "Sparsifiers", text, table(head, rows, 2), results


def kernels():
    results = Results("kernels-cpu-jax0.10.2")
    rows = []
    for row in charts.kept(results.rows):
        if row["part"] in ("compact", "bitmap_decode", "partition"):
            share = f"{row['density']:.0%}" if "density" in row else ""
            ms = digits(1e3 * seconds(row), 2)
            rows.append([f"`{row['part']}`", share, row["side"], ms, times(row["ratio"])])
    text = """Milliseconds of the kernels' definitions in plain XLA on two cores, and of
others that do the same."""
    head = ["operation", "density", "side", "ms", "times ours"]
    return "Kernels, on a CPU", text, table(head, rows, 3), results


BACKENDS = ("reference", "triton", "pallas")


def kernels_on_a_gpu():
    results = Results("gpu-jax0.11.2")
    rows = []
    for size in (214_000_000, 1 << 24):
        found = charts.kept(results.where(size=size, density=0.01))
        for operation in dict.fromkeys(row["part"] for row in found):
            sides = {r["side"]: r for r in found if r["part"] == operation}
            ms = lambda name, of=sides: f"{1e3 * seconds(of[name]):.2f}"
            own = [ms(name) if name in sides else "" for name in BACKENDS]
            others = [f"{n} {ms(n)}" for n in sides if n not in BACKENDS]
            others = [x for x in others if not x.startswith("append")]
            rows.append([f"`{operation}`", f"{size:,}", *own, ", ".join(others)])
    copied = results.one(part="compact", size=214_000_000, density=0.01, side="copy")
    rate = 8e-12 * 214_000_000 / seconds(copied)
    text = f"""Milliseconds on an H200, of float32 of which 1% are not zero, in plain XLA,
in Triton and in Pallas. Memory copied at {rate:.2f} TB/s. Below 0.1 ms a call takes as long
as Python needs to launch it. Each result was compared with that of plain XLA. "auto" takes
what is a tenth faster than plain XLA, by the clock and by how long the device is busy."""
    head = ["operation", "numbers", "XLA", "Triton", "Pallas", "others"]
    return "Kernels, on a GPU", text, table(head, rows, 2), results


def steps_on_a_gpu():
    results, counts = Results("gpu-jax0.11.2"), Results("device-jax0.11.2")
    newest = Results("gpu-jax0.12.0.1")
    rows = []
    for row in results.where(part="steps"):
        if row["kernels"] == "auto":
            continue
        key = {name: row[name] for name in ("load", "scheme", "kernels")}
        profile = results.one(part="profile", **key)
        by = counted_with(row["scheme"], row["kernels"])
        count = counts.one(load=row["load"], scheme=row["scheme"], kernels=by)
        cells = [1e3 * x for x in (seconds(row), profile["busy"], count["device"])]
        on_newest = 1e3 * seconds(newest.one(part="steps", **key))
        head = [row["load"], row["scheme"], row["kernels"].replace("reference", "XLA")]
        rows.append([*head, *(f"{x:.2f}" for x in cells), f"{on_newest:.2f}"])
    text = f"""One rank's step of sixteen on one H200, in milliseconds: the program that
each rank runs, with copies on the device in place of collectives, so all but the network.
*Busy* is the sum of its kernels by the profiler, *counted* what `make device` counts. The
last column is of JAX 0.12 (`benchmarks/results/{newest.name}`), which launches Triton's
kernels itself; there bitmaps were still unpacked entry by entry."""
    head = ["gradient", "scheme", "kernels", "ms", "busy", "counted", "JAX 0.12"]
    return "A rank's step, on a GPU", text, table(head, rows, 3), results


def counted():
    results = Results("device-jax0.11.2")
    # The record has steps of a scheme that is gone, too, and of kernels that are.
    sides = ("all-reduce", "agsparse", "zen", "zen, in any order", "zen, Algorithm 1")
    there = [row for row in results.rows if row["scheme"] in sides]
    there = [row for row in there if row.get("kernels") != "pallas"]
    rows = []
    for row in sorted(there, key=lambda row: row["load"]):
        kernels = row.get("kernels")
        side = row["scheme"] + (f", kernels in {kernels.title()}" if kernels else "")
        cells = [f"{row[key]:.0f}" for key in ("launches", "waits")]
        cells += [f"{row['sent'] / 1e6:,.1f}", f"{1e3 * row['device']:.2f}"]
        rows.append([row["load"], side, *cells, *(f"{1e3 * s:.2f}" for s in row["wire"])])
    text = """A step compiled for sixteen described H200s and counted. Times follow from
stated costs (3 µs a launch, 10 µs a wait, 80% of 4.8 TB/s) and of what a scattered write
took on an H200, beside the time of the bytes at three rates. **They are no measurements**:
see the section above for how far they are off."""
    head = ["gradient", "scheme", "launches", "waits", "MB sent", "device, ms"]
    head += ["at 25 Gbit/s", "at 100", "at 400"]
    return "A step on a GPU, counted", text, table(head, rows, 2), results


def compiling():
    old, new = Results("core-jax0.10.2"), Results("core-jax0.12.0.1")
    rows = []
    for row in old.where(part="compile"):
        other = new.where(part="compile", what=row["what"])
        goal = row["to_reach"]
        both = [row["ratio"], *(r["ratio"] for r in other)]
        rows.append([row["what"], *(_against(x, goal) for x in both), goal or ""])
    text = f"""The time to trace and compile, as a multiple of a dense train step of
forty leaves. XLA:CPU compiles each fused kernel by itself, so a sparse exchange costs
compile time. The second column is of `benchmarks/results/{new.name}`. The last one is what
was to be reached: a number in bold is above it."""
    head = ["what", "JAX 0.10.2", "JAX 0.12.0.1", "goal"]
    return "Compiling", text, table(head, rows), old


def _against(ratio, goal):
    """A ratio, in bold where it is above its goal."""
    text = f"{ratio:.2f}"
    return f"**{text}**" if goal and ratio > goal else text


def compiling_many_leaves():
    results = Results("first_step-jax0.10.2")
    rows = []
    for row in [r for name in ("transformer", "dlrm") for r in results.where(model=name)]:
        goal = row["to_reach"] and row["to_reach"] * row["ratio"] / row["median"]
        cells = f"{row['init']:.1f}", f"{row['median']:.1f}"
        ratio = _against(row["ratio"], goal)
        said = f"{goal:.2f}" if goal else ""
        rows.append([row["model"], row["sum"], *cells, ratio, said])
    text = """What a user waits for before the first step of a model of many leaves:
the first state, and tracing and compiling. The transformer has 195 leaves of eight shapes,
the click model (DLRM) 26 tables of 26 heights. The last column is what was to be reached: a
number in bold is above it. The dense step of the click model compiles in a third of the
time of the other one, so what an exchange, a selection or a top-k system adds weighs more
there. What is done table by table is compiled table by table, and XLA:CPU shares nothing
between tables of different heights. By rows, each table has its own lists, rows that catch
up and rows that are written back; EmbRace's also have what is sent first and what is sent
later; a sparsifier has a program of its own for each."""
    head = ["model", "system", "init, s", "step, s", "times dense", "goal"]
    return "Compiling many leaves", text, table(head, rows, left=2), results


def compiling_for_ranks():
    results = Results("programs-compiled-jax0.10.2")
    ranks = sorted({row["ranks"] for row in results.rows})
    rows = []
    for scheme in dict.fromkeys(row["scheme"] for row in results.rows):
        of = [results.one(scheme=scheme, ranks=n) for n in ranks]
        rows.append([scheme, *(digits(row["processor"], 2) for row in of)])
    text = """Seconds of all processors in which XLA:CPU compiles one exchange, by the
number of simulated devices. Where owners are sent their parts, XLA:CPU makes an all-to-all
of an array a rank, and code that joins them. This says nothing of XLA for GPUs."""
    head = ["scheme", *(f"{n} ranks" for n in ranks)]
    return "Compiling for many ranks", text, table(head, rows), results
