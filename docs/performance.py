"""Writes performance.md, faults.md, and README's table of gains, from benchmarks/results.

`python docs/performance.py` writes all three; a test holds that they are what it would
write. No figure of them is written by hand.
"""

import statistics

import faults
import gains
from recorded import ROOT, Results, digits, seconds, spread, table, times

from benchmarks.gpu.steps import counted_with


PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"

SETS = {
    "lstm": "rows, drawn by a Zipf law",
    "deepfm": "rows, drawn by a Zipf law",
    "nmt": "rows, drawn by a Zipf law",
    "topk": "single numbers",
    "language": "rows, of a language model",
    "translation": "rows, of a translator",
    "clicks": "rows, of a click model",
}
SIDES = {
    "zen": "`zen_sync`",
    "rows": "`zen_sync`, `lazy`",
    "rows, capacity": "the same, `capacity=90_000`",
    "exact": "`lazy`",
    "touched": "`lazy`, `exact=False`",
    "vertical": "hybrid, vertical",
    "horizontal": "hybrid, horizontal",
    "both": "hybrid, both",
    "embrace": "EmbRace's hybrid, `column_lookup`",
    "ok_topk": "`ok_topk_sync`",
    "spardl": "`spardl_sync`",
    "dragonn": "`dragonn`, `zen_sync`",
    "dgc": "`dgc`, `zen_sync`",
}


# --- Sections: each returns a title, what it says, a table, and its file.


def on_a_network():
    results = Results("communication-jax0.10.2")
    hosts = (2, 4, 8, 16)
    rows = []
    for name, meaning in SETS.items():
        gains, zen = [], {}
        for n in hosts:
            of = {"workload": name, "hosts": n, "rate": "250mbit"}
            dense, zen = (results.one(**of, scheme=side) for side in ("psum", "zen"))
            gains.append(times(seconds(dense) / seconds(zen)))
        shares = [f"{zen[key]:.1%}" for key in ("density", "after")]  # on the most hosts
        rows.append([f"`{name}`", meaning, *shares, *gains])
    text = """How many times as fast as `lax.psum` Zen adds up 16 MB (8 MB for recorded
sets), one process a host, each with a link of 250 Mbit/s, all of them on two shared
cores. Every sum was checked against that of float64. The last three sets were recorded
from training; densities are those of one of 16 hosts, and of their sum."""
    head = ["set", "what it is", "density", "of the sum", *(f"{n} hosts" for n in hosts)]
    return "Sums on a limited network", text, table(head, rows, 2), results


def by_scheme():
    results = Results("communication-jax0.10.2")
    sets = [name for name in SETS if name != "nmt"]
    of = {"hosts": 16, "rate": "250mbit"}
    rows = []
    for side in [r["scheme"] for r in results.where(workload="lstm", **of)]:
        cells = []
        for name in sets:
            found = results.where(workload=name, scheme=side, **of)
            cells.append(f"{1e3 * seconds(found[0]):,.0f}" if found else "")
        rows.append([side, *cells])
    text = """Milliseconds of one sum over 16 hosts by every scheme, and by PyTorch's
gloo. Less is better. On 16 hosts that share two cores the work of the hosts adds up, so
these ratios are less than hosts with cores of their own would have."""
    head = ["scheme", *(f"`{name}`" for name in sets)]
    return "By scheme", text, table(head, rows), results


PACE = ("hosts", "side", "steps/s", "times dense", "MB sent")


def pace(results, row, of):
    """The cells `PACE` of a row, beside the dense row that has the same values `of`."""
    dense = results.where(scheme="dense", **of)
    gain = times(seconds(dense[0]) / seconds(row)) if dense else ""
    side = SIDES.get(row["scheme"], row["scheme"])
    rate, sent = digits(1 / seconds(row), 2), digits(row["sent"] / 1e6, 2)
    return [row["hosts"], side, rate, gain, sent]


def end_to_end():
    results = Results("end-to-end-jax0.10.2")
    rows = []
    for task, about, hosts in dict.fromkeys(
        (row["task"], row["about"], row["hosts"]) for row in results.rows
    ):
        of = {"task": task, "about": about, "hosts": hosts}
        for row in results.where(**of):
            rows.append([f"{task}, {about}", *pace(results, row, of)])
    text = """Steps a second of whole training steps at 250 Mbit/s, how many times those
of dense gradients, and the MB that a host sends. `gathered` sends all lists to all
hosts, as Horovod does; PyTorch has sparse embeddings, gloo's sparse all-reduce and
SparseAdam."""
    return "Whole steps", text, table(["model", *PACE], rows, 3), results


def workloads():
    results = Results("workloads-network-jax0.10.2")
    rows = []
    for row in results.rows:
        of = {"example": row["example"], "hosts": row["hosts"]}
        rows.append([f"`{row['example']}`", *pace(results, row, of)])
    text = """Steps a second of the examples at 250 Mbit/s, how many times those of dense
gradients, and the MB that a host sends in a step. All sides start from the same
parameters and train on the same batches. The language model has two tables of 40,000 x 128
here; all else is as `examples/` has it. PyTorch trains by DistributedDataParallel over
gloo; its sparse side has sparse embeddings and SparseAdam, which is another optimizer: it
leaves rows alone that a step does not read. The hosts share two cores, so the more there
are, the less these ratios are."""
    return "The examples", text, table(["example", *PACE], rows, 3), results


def to_the_same_loss():
    results = Results("workloads-curves-jax0.10.2")
    rows = []
    for row in results.rows:
        side = SIDES.get(row["scheme"], row["scheme"])
        share = f"{row['share']:.2f}"
        rows.append([f"`{row['example']}`", row["hosts"], side, share])
    text = """The time in which each side reaches the loss with which dense gradients end,
as a share of the time that these take, at 250 Mbit/s. A plot is beside the file."""
    head = ["example", "hosts", "side", "share of the time"]
    return "Time to the same loss", text, table(head, rows, 3), results


def in_one_process():
    results = Results("rows-jax0.10.2")
    rows = []
    for row in results.rows:
        side = SIDES.get(row["side"], row["side"])
        fast = times(row["times_as_fast"])
        mib = f"{row['temporaries'] / 2**20:,.0f}"
        name = f"{row['rows']:,}, {row['ids']}"
        rows.append([name, side, digits(row["milliseconds"], 2), fast, mib])
    text = """A step of a click model with Adam in one process, without any network:
what updating only the rows that were read saves by itself. `exact=False` is the lazy
Adam that leaves unread rows alone."""
    head = ["rows of the table, ids", "side", "ms", "times dense", "temporaries, MiB"]
    return "Tables by rows, in one process", text, table(head, rows, 2), results


def bytes_sent():
    results = Results("core-jax0.10.2")
    rows = []
    for density in (0.001, 0.01, 0.03, 0.1, 0.3):
        row = results.one(part="bytes", kind="independent", density=density)
        mb = [
            digits(row[key] / 1e6)
            for key in ("payload", "wire", "coo", "hash_bitmap", "dense")
        ]
        least = digits((row["values"] + row["entropy"]) / 1e6)
        rows.append([f"{density:.1%}", f"{row['after']:.1%}", least, *mb])
    text = """MB that one of eight ranks sends to add up 4M floats, push and pull
together. The first column of bytes is the values and the entropy of the sets, which no
lossless code falls below; *wire* is what was sent, padding included; COO and the hash
bitmap are the papers' formats for the same sets, without padding."""
    head = ["density", "of the sum", "least", "payload", "wire", "COO", "hash bitmap"]
    return "Bytes", text, table([*head, "all-reduce"], rows), results


def dense_costs():
    results = Results("overhead-jax0.10.2")
    rows = []
    for hosts in (1, 2, 16):
        cells = []
        for load in ("dense", "tiny"):
            for side in ("psum", "zen"):
                row = results.one(workload=load, hosts=hosts, scheme=side)
                cells.append(digits(1e3 * seconds(row), 3))
        rows.append([hosts, *cells])
    text = """Milliseconds where sparsity does not help: 16 MB without a zero (`dense`),
and 4,096 numbers (`tiny`), at 250 Mbit/s. By default leaves as small as the second are
not looked at."""
    head = ["hosts", "dense: psum", "zen", "tiny: psum", "zen"]
    return "Where sparsity does not help", text, table(head, rows), results


def embrace():
    results = Results("embrace-network-jax0.10.2")
    rows = []
    for task in ("language", "translation"):
        for hosts in (4, 16):
            for row in results.where(task=task, hosts=hosts):
                if "gain" not in row or row.get("stall") is None:
                    continue
                cells = [
                    f"{1 / seconds(row):.2f}",
                    times(row["gain"]) if row["gain"] >= 9.95 else f"{row['gain']:.2f}",
                    f"{1e3 * row['stall']:,.0f}",
                    f"{row['sent'] / 1e6:.2f}",
                    f"{row['table_bytes'] / 1e6:.2f}",
                ]
                side = SIDES.get(row["scheme"], row["scheme"])
                rows.append([task, hosts, side, *cells])
    text = """Steps a second at 250 Mbit/s, how many times those of the best of
all-reduce, all-gather and Parallax, the computation stall, the MB that a host sends,
and the MB of tables that a rank holds. *hybrid* is `column_lookup`; *vertical* and
*horizontal* are the two dimensions of the schedule, which gain nothing on CPUs: there
nothing is sent while something is computed."""
    head = ["model", "hosts", "system", "steps/s", "times best", "stall, ms", "MB sent"]
    return "EmbRace", text, table([*head, "tables, MB"], rows, 3), results


def selecting():
    results = Results("choosing-network-jax0.10.2")
    rows = []
    for hosts, rate in ((14, "50mbit"), (14, "250mbit"), (16, "50mbit"), (16, "25mbit")):
        for row in results.where(hosts=hosts, rate=rate):
            mean = statistics.mean(row["seconds"])
            sent = digits(row["sent"] / 1e6, 2)
            rows.append([hosts, rate, row["scheme"], f"{1e3 * mean:,.0f}", sent])
    text = """Mean milliseconds to select and add up 1% of 4M numbers, and the MB that a
host sends. All hosts share two cores, so work is a large part of it."""
    head = ["hosts", "rate", "system", "ms", "MB sent"]
    return "Selecting while reducing: Ok-Topk, SparDL", text, table(head, rows, 3), results


def accuracy():
    results = Results("choosing-training-jax0.10.2")
    rows = []
    of = {"part": "convergence", "optimizer": "momentum", "steps": 200}
    for row in results.where(task="digits", **of):
        other = results.where(task="text", name=row["name"], **of)
        loss = spread(other[0]["loss"], 3) if other else ""
        sent = f"{row['wire_bytes']:,.0f}"
        rows.append([row["name"], spread(row["accuracy"], 4), sent, loss])
    text = """200 steps with 1% of the gradient and a momentum of 0.9, four ranks, three
seeds: mean and standard deviation. All are behind dense after so few steps, two of them
on text by 1.4 deviations; [Dense gradients](dense.md) tells what is done about that."""
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
    for size, density in ((1 << 24, 0.001), (1 << 24, 0.01), (1 << 27, 0.001)):
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
    for row in results.rows:
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
        found = [row for row in results.where(size=size, density=0.01) if "side" in row]
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
    # The record has steps of a scheme that is gone, too.
    sides = ("all-reduce", "agsparse", "zen", "zen, in any order", "zen, Algorithm 1")
    there = [row for row in results.rows if row["scheme"] in sides]
    rows = []
    for row in sorted(there, key=lambda row: row["load"]):
        kernels = row.get("kernels")
        side = row["scheme"] + (f", kernels in {kernels.title()}" if kernels else "")
        cells = [f"{row[key]:.0f}" for key in ("launches", "waits")]
        cells += [f"{row['sent'] / 1e6:,.1f}", f"{1e3 * row['device']:.2f}"]
        rows.append([row["load"], side, *cells, *(f"{1e3 * s:.2f}" for s in row["wire"])])
    text = """A step compiled for sixteen described H200s and counted. Times follow from
stated costs (3 µs a launch, 10 µs a wait, 80% of 4.8 TB/s), beside the time of the bytes at
three rates. **They are no measurements**: see the section above for how far they are off.
Single numbers that are scattered take up to three times as long as counted."""
    head = ["gradient", "scheme", "launches", "waits", "MB sent", "device, ms"]
    head += ["at 25 Gbit/s", "at 100", "at 400"]
    return "A step on a GPU, counted", text, table(head, rows, 2), results


def compiling():
    old, new = Results("core-jax0.10.2"), Results("core-jax0.12.0.1")
    rows = []
    for row in old.where(part="compile"):
        other = new.where(part="compile", what=row["what"])
        ratios = [f"{row['ratio']:.2f}", f"{other[0]['ratio']:.2f}" if other else ""]
        rows.append([row["what"], *ratios])
    text = f"""The time to trace and compile, as a multiple of a dense train step of
forty leaves. XLA:CPU compiles each fused kernel by itself, so a sparse exchange costs
compile time. The second column is of `benchmarks/results/{new.name}`."""
    head = ["what", "JAX 0.10.2", "JAX 0.12.0.1"]
    return "Compiling", text, table(head, rows), old


def compiling_many_leaves():
    results = Results("first_step-jax0.10.2")
    rows = []
    for row in [r for name in ("transformer", "dlrm") for r in results.where(model=name)]:
        seconds = f"{row['median']:.1f}", f"{row['ratio']:.1f}"
        rows.append([row["model"], row["sum"], f"{row['init']:.1f}", *seconds])
    text = """What a user waits for before the first step of a model of many leaves:
the first state, and tracing and compiling. The transformer has 195 leaves of eight shapes,
the click model (DLRM) 26 tables of 26 heights. Ratios above 3 are those of the click model,
whose dense step compiles in a third of the time: what an exchange, a selection or a top-k
system adds weighs more beside it. What is done table by table is compiled table by table,
and XLA:CPU shares nothing between tables of different heights. By rows, each table has its
own lists, rows that catch up and rows that are written back; EmbRace's also have what is
sent first and what is sent later; a sparsifier has a program of its own for each."""
    head = ["model", "system", "init, s", "step, s", "x dense"]
    return "Compiling many leaves", text, table(head, rows, left=2), results


SECTIONS = (
    *(on_a_network, by_scheme, workloads, to_the_same_loss, end_to_end, in_one_process),
    *(bytes_sent, dense_costs),
    *(embrace, selecting, accuracy, accuracy_of_sparsifiers, encoding, kernels),
    *(kernels_on_a_gpu, steps_on_a_gpu, counted),
    compiling,
    compiling_many_leaves,
)
HEAD = """# Performance

<!-- Made by `python docs/performance.py` from benchmarks/results: do not edit. -->

All figures that are recorded, with the file that each comes from. Ratios were taken in one
run, sides alternating. How everything was measured, and what is wrong with it, is in
`benchmarks/README.md`. What training does when something breaks is
[on a page of its own](faults.md).
"""


def page():
    parts = [HEAD]
    for section in SECTIONS:
        title, text, rows, results = section()
        parts.append(f"## {title}\n\n{text}\n\n{rows}\n\n{results.source()}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    README.write_text(gains.readme(README.read_text()))
    faults.PAGE.write_text(faults.page())
