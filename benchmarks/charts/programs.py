"""Charts of programs: the time to compile them, and kernels and steps of a GPU."""

from benchmarks.charts.chart import Chart, Panel, series
from benchmarks.gpu.steps import counted_with
from benchmarks.harness import results


BACKENDS = {"triton": "Triton", "pallas": "Pallas"}
# Operations and sides of the records that the library has no more.
GONE = {
    ("partition_by_bits", "reference"),
    ("partition", "partition_by_bits"),
    ("pack_message", "pallas"),
    ("unpack_message", "pallas"),
    ("coo_add", "reference"),
    ("coo_add", "triton"),
}


def kept(rows: list) -> list:
    """The rows of what was timed, of operations and sides that the library has."""
    timed = [row for row in rows if "side" in row]
    return [row for row in timed if (row["part"], row["side"]) not in GONE]


def kernels() -> Chart:
    """Kernels in Triton and in Pallas against plain XLA on a GPU."""
    found = results.read("gpu-jax0.11.2")
    panels = []
    for size in (214_000_000, 1 << 24):
        rows = kept(found.where(size=size, density=0.01))
        operations = dict.fromkeys(row["part"] for row in rows)
        time = {(row["part"], row["side"]): results.seconds(row) for row in rows}
        shown = [
            series(
                label,
                [
                    (name, time[name, "reference"] / time[name, side])
                    for name in operations
                    if (name, side) in time
                ],
            )
            for side, label in BACKENDS.items()
        ]
        title, value = f"{size:,} numbers", "times as fast as XLA"
        panels.append(Panel(title, tuple(shown), value, kind="dots", log="value", mark=1))
    says = "How many times as fast as plain XLA kernels in Triton and Pallas are"
    return Chart("kernels", says, tuple(panels), (found,), height=3.2)


def gpu_steps() -> Chart:
    """One rank's step on a GPU: by the clock, by the profiler, and as it is counted."""
    found, counts = results.read("gpu-jax0.11.2"), results.read("device-jax0.11.2")
    clock, busy, counted = [], [], []
    for row in found.where(part="steps"):
        if row["kernels"] == "auto":
            continue
        key = {name: row[name] for name in ("load", "scheme", "kernels")}
        by = counted_with(row["scheme"], row["kernels"])
        count = counts.one(load=row["load"], scheme=row["scheme"], kernels=by)
        name = row["kernels"].replace("reference", "XLA").replace("triton", "Triton")
        at = f"{row['load']}: {row['scheme']}, {name}"
        clock.append((at, 1e3 * results.seconds(row)))
        busy.append((at, 1e3 * found.one(part="profile", **key)["busy"]))
        counted.append((at, 1e3 * count["device"]))
    shown = (
        series("by the clock", clock),
        series("its kernels, by the profiler", busy),
        series("as counted", counted),
    )
    panel = Panel("", shown, "ms", kind="dots", log="value")
    says = "Milliseconds of one rank's step on a GPU, measured and counted"
    return Chart("gpu_steps", says, (panel,), (found, counts), height=5.6)


MODELS = {"transformer": "transformer, 195 leaves", "dlrm": "click model, 26 tables"}


def compiling() -> Chart:
    """The time to compile a first step, by system, and a program, by ranks."""
    steps = results.read("first_step-jax0.10.2")
    ranks = results.read("programs-compiled-jax0.10.2")
    by_system = [
        series(
            label,
            [
                (row["sum"], row["ratio"])
                for row in steps.where(model=model)
                if row["to_reach"]
            ],
        )
        for model, label in MODELS.items()
    ]
    dense = {model: steps.one(model=model, sum="dense")["median"] for model in MODELS}
    goals = [
        (row["sum"], row["to_reach"] / dense[row["model"]])
        for row in steps.where(model="transformer")
        if row["to_reach"]
    ]
    by_system.append(series("goal of both", goals, dashed=True))
    schemes = dict.fromkeys(row["scheme"] for row in ranks.rows)
    by_ranks = [
        series(
            scheme,
            [(row["ranks"], row["processor"]) for row in ranks.where(scheme=scheme)],
            scheme == "all-reduce",
        )
        for scheme in schemes
    ]
    return Chart(
        "compiling",
        "The time to compile a first step by system, and a program by the number of ranks",
        (
            Panel(
                "a first step", tuple(by_system), "times dense", kind="dots", log="value"
            ),
            Panel(
                "one exchange, by ranks",
                tuple(by_ranks),
                "processor seconds",
                "ranks",
                log="both",
            ),
        ),
        (steps, ranks),
        height=3.8,
    )
