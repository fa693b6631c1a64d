"""Kernels and a step of one GPU, and the time to compile."""

from recorded import seconds, times

from benchmarks.charts import programs as charts
from topics.words import between, listed


def kernels():
    chart = charts.kernels()
    found = chart.files[0]
    large, small = chart.panels
    slower = [p.at for p in small.series[0].points if p.value < 1]
    by_gain = sorted(large.series[0].points, key=lambda p: -p.value)
    most = [f"`{p.at}` {times(p.value)}" for p in by_gain[:3]]
    least = between([p.value for p in by_gain[3:]], 2)
    of = {"part": "compact", "side": "triton", "size": 1 << 24, "density": 0.01}
    time = 1e3 * seconds(found.one(**of))
    text = f"""On {large.title} three kernels in Triton are much faster than plain
XLA: {listed(most)} times as fast. The others are {least} times as fast.

**Limits.** On {small.title} {len(slower)} of {len(by_gain)} kernels in Triton are slower
than plain XLA: a call takes about as long as Python needs to launch it ({time:.2f} ms for
`compact`). `"auto"` takes a kernel only where it is a tenth faster, by the clock and by how
long the device is busy."""
    conditions = """Float32 of which one in a hundred is not zero. Each result was compared
with that of plain XLA. Where a point is missing, a kernel is missing."""
    return "Kernels, on a GPU", text, chart, conditions, ["Kernels, on a GPU"]


def steps_of_a_rank():
    chart = charts.gpu_steps()
    clock, busy, counted = (
        chart.points(label)
        for label in ("by the clock", "its kernels, by the profiler", "as counted")
    )
    pairs = {at: at.replace(", XLA", ", Triton") for at in clock if at.endswith(", XLA")}
    pairs = {one: other for one, other in pairs.items() if other in clock}
    gain = {one: clock[one].value / clock[other].value for one, other in pairs.items()}
    best, worst = max(gain, key=gain.get), min(gain, key=gain.get)
    off = [busy[at].value / counted[at].value for at in clock]
    bare = lambda at: at.removesuffix(", XLA").replace(": ", ", ")
    text = f"""The program of one rank of sixteen, without its network. With kernels in
Triton it is up to {times(gain[best])} times as fast as in plain XLA ({bare(best)}).

**Limits.** It is slower where a step is short: {gain[worst]:.2f} times as fast for
{bare(worst)}, whose kernels are busy for {busy[pairs[worst]].value:.2f} of
{clock[pairs[worst]].value:.2f} ms. What is counted for a GPU without one is
{between([1 / x for x in off], 2)} times what the profiler saw, so [what is
counted](performance_tables.md#a-step-on-a-gpu-counted) is no measurement."""
    conditions = """Collectives are replaced by copies on the device. What is counted is
what `make device` derives from the compiled program and stated costs. Numbers by plain XLA
were measured before bitmaps were unpacked in the order of the array."""
    tables = ["A rank's step, on a GPU", "A step on a GPU, counted"]
    return "A rank's step, on a GPU", text, chart, conditions, tables


def compiling():
    chart = charts.compiling()
    steps, _ = chart.files
    missed = {}
    for model, label in charts.MODELS.items():
        rows = [row for row in steps.where(model=model) if row["to_reach"]]
        far = [row for row in rows if row["median"] > row["to_reach"]]
        missed[label] = [row["sum"] for row in far], len(rows)
    ratio = lambda label: chart.value(label, "zen")
    labels = list(charts.MODELS.values())
    goal = chart.value("goal of both", "zen")
    model = lambda label: label.split(", ")[0]
    said = [
        f"{len(far)} of {count} systems for the {model(label)}"
        for label, (far, count) in missed.items()
    ]
    slowest = max(chart.points(labels[1]).values(), key=lambda p: p.value)
    few, many = min(chart.points("zen", 1)), max(chart.points("zen", 1))
    by_ranks = [f"{chart.value('zen', n, 1):.1f} s on {n}" for n in (few, many)]
    text = f"""XLA:CPU compiles each fused kernel separately, so an exchange costs compile
time. `zen_sync` takes {times(ratio(labels[0]))} times as long as dense gradients for the
first step of a {" of ".join(labels[0].split(", "))}, and {times(ratio(labels[1]))} times as
long for that of a {" of ".join(labels[1].split(", "))}.

**Limits.** The goal, {times(goal)} times, is missed by {listed(said)}; the longest is
`{slowest.at}` with {times(slowest.value)}. What is done table by table is compiled table by
table. The program of one exchange grows with the ranks where owners are sent their parts:
Zen takes {listed(by_ranks)} ranks. These figures say nothing about XLA for
GPUs."""
    conditions = """Time to trace and compile, medians of the runs. Left: four simulated
devices. Right: seconds of all processors, on one simulated device a rank."""
    tables = ["Compiling", "Compiling many leaves", "Compiling for many ranks"]
    return "Compiling", text, chart, conditions, tables
