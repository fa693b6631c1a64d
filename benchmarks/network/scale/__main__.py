"""What a step takes on more hosts than there are here: 128 and 1,024, at 25 and 100 Gbit/s.

    python -m benchmarks.network.messages --rates 100mbit 250mbit 1gbit
    python -m benchmarks.network.scale

The rounds of a step are counted from drawn sets (`rounds`). What a collective takes is
fitted to measurements of collectives by themselves and to steps of `psum`, which is one,
and the work of a step to its processor time (`model`). Of schemes no step's time by the
clock is used, and of the most hosts no row. The errors are printed, and the ratio of
measured to predicted times gives the range of what follows.

The extension is told twice. *This CPU*: gloo and the work as they were measured, each
host with a core of its own. *GPUs*: what `benchmarks.device` has counted for sixteen H200s,
by its stated costs; bytes at the link's rate; and a stated latency, of one message a
collective at least, and of all its messages one behind the other at most.
"""

import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Iterator

import numpy as np

from benchmarks.data import workloads
from benchmarks.harness import figure, record as records, settings, table
from benchmarks.harness.record import say
from benchmarks.harness.results import Results
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.network.scale import gpus, model, plot, rounds
from benchmarks.network.scale.model import Here, Step


KINDS = ("pmax", "all_to_all", "all_gather", "ppermute", "psum")


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Predicts steps on many hosts from measured rounds and measured work."""

    PROGRAM = "benchmarks.network.scale"
    steps: str = option("communication", "the results with steps")
    rounds: str = option("messages", "the results with collectives")
    device: str = option("device-jax0.11.2.jsonl", "the results counted for GPUs")
    workloads: tuple[str, ...] = option(("lstm", "deepfm"), "Zipf workloads of the steps")
    hosts: tuple[int, ...] = option((128, 1024), "numbers of hosts to print")
    gbits: tuple[int, ...] = option((25, 100), "rates of the extension, Gbit/s")
    latency: float = option(20.0, "stated microseconds of a message between GPUs")
    name: str = option("scale", "of the files that are written")


def main(argv: list[str] | None = None) -> int:
    given = Settings.parse(argv)
    head, collectives = read(given.rounds)
    of_steps, rows = read(given.steps)
    say(f"steps of {of_steps['date']}, collectives of {head['date']}, {head['processor']}")
    cores = head["cores"]
    rows = [row for row in rows if row["workload"] in given.workloads and row["wire"]]
    steps = [Step(row, counted(row)) for row in rows if row["scheme"] in SIDES]
    steps = [step for step in steps if step.rounds]
    most = max(step.row["hosts"] for step in steps)
    below = lambda rows: [row for row in rows if row["hosts"] < most]
    collectives += sums(steps)
    kinds = model.fitted(below(collectives), cores)
    show_kinds(kinds, f"collectives, fitted below {most} hosts")
    works = work_of([step for step in steps if step.row["hosts"] < most], kinds)
    lines = [
        held(step, works, kinds, cores) for step in steps if step.row["scheme"] in works
    ]
    show_errors(lines, most)
    ranges = ranges_of(lines)

    kinds = model.fitted(collectives, cores)
    works = work_of(steps, kinds)
    show_kinds(kinds, "collectives, fitted to all")
    found = [*on_cpus(given, works, kinds, ranges), *gpus.extended(given)]
    for hosts in given.hosts:
        for gbit in given.gbits:
            here = [x for x in found if (x["hosts"], x["gbit_per_s"]) == (hosts, gbit)]
            table.show(here, COLUMNS, f"{hosts:,} hosts, {gbit} Gbit/s")
    figure.save(given.name, found, plot.drawn(found, given.gbits))
    figure.save(given.name, lines, part="errors")
    say(f"\nwritten: {given.name} as CSV and PNG, and the errors as CSV")
    return 0


SIDES = (
    *("psum", "zen", "balanced", "hierarchical", "agsparse", "sparcml", "omnireduce"),
    "sparseps",
)
COLUMNS = [
    Column("work", "work"),
    Column("array", "workload"),
    Column("side", "scheme"),
    Column("MB sent", "bytes", ",.2f", 1e-6),
    Column("collectives", "collectives", "d"),
    Column("link ms", "link_s", ",.2f", 1e3),
    Column("ms", "seconds", ",.2f", 1e3),
    Column("from", "low_s", ",.2f", 1e3),
    Column("to", "high_s", ",.2f", 1e3),
]


def read(name: str) -> tuple[dict, list[dict]]:
    """The head and the rows of a result file, by its name or its path."""
    path = pathlib.Path(name)
    if not path.exists():
        path = records.path_of(name, ".jsonl")
    found = Results(path)
    return found.head, found.rows


_drawn: dict[tuple[str, int], np.ndarray] = {}


def sets_of(name: str, hosts: int) -> tuple[np.ndarray, int]:
    """The sets of so many ranks of a workload, and the numbers in a row."""
    workload = workloads.all_workloads()[name]
    if (name, hosts) not in _drawn:
        _drawn[name, hosts] = workload.sets(hosts)
    return _drawn[name, hosts], workload.width


def counted(row: dict) -> list[rounds.Round]:
    """The rounds of a step; none, and a message, if it was measured with other bytes."""
    found = rounds.of_step(row["scheme"], *sets_of(row["workload"], row["hosts"]))
    sent = model.sent(found, row["hosts"])
    if abs(sent - row["wire"]) > 0.013 * row["wire"] + 256:
        say(
            f"left out: {row['scheme']}, {row['workload']}, {row['hosts']} hosts sent "
            f"{row['wire']:,.0f} bytes when it was measured, and would send {sent:,.0f}"
        )
        return []
    return found


def sums(steps: list[Step]) -> list[dict]:
    """Steps that are an all-reduce and nothing else, as collectives by themselves."""
    rows = [step.row for step in steps if step.row["scheme"] == "psum"]
    return [
        row | {"collective": "psum", "array": 4 * int(np.prod(row["shape"]))}
        for row in rows
    ]


def work_of(steps: list[Step], kinds: dict) -> dict[str, model.Work]:
    """The work of each scheme that has been measured."""
    by_name: dict[str, list[Step]] = {}
    for step in steps:
        by_name.setdefault(step.row["scheme"], []).append(step)
    return {name: model.work_of(some, kinds) for name, some in by_name.items()}


def held(step: Step, works: dict, kinds: dict, cores: int) -> dict:
    """A measured step beside what the model says of it."""
    row, here = step.row, Here.testbed(step.row, cores)
    told = model.time(step.rounds, works[row["scheme"]], kinds, here)
    measured = statistics.median(row["seconds"])
    names = ("workload", "rate", "hosts", "scheme")
    line = {name: row[name] for name in names}
    return line | {"measured_s": measured, "model_s": told, "ratio": measured / told}


def show_errors(lines: list[dict], most: int) -> None:
    """Prints by how much the model was off."""
    by_group: dict[tuple, list[dict]] = {}
    for line in lines:
        by_group.setdefault((line["hosts"], line["rate"]), []).append(line)
    rows = []
    for (hosts, rate), some in sorted(by_group.items()):
        off = sorted(1 / line["ratio"] - 1 for line in some)
        middle = statistics.median(map(abs, off))
        row = {"hosts": hosts, "rate": rate, "steps": len(some), "off": middle}
        rows.append(row | {"least": off[0], "most": off[-1]})
    columns = [
        Column("hosts", "hosts", "d"),
        Column("rate", "rate"),
        Column("steps", "steps", "d"),
        Column("off by, median", "off", ".0%"),
        Column("least", "least", "+.0%"),
        Column("most", "most", "+.0%"),
    ]
    table.show(rows, columns, "model over measured times of steps, less 1")
    columns = [
        Column("array", "workload"),
        Column("rate", "rate"),
        Column("side", "scheme"),
        Column("measured ms", "measured_s", ",.1f", 1e3),
        Column("model ms", "model_s", ",.1f", 1e3),
        Column("off", lambda line: 1 / line["ratio"] - 1, "+.0%"),
    ]
    some = [line for line in lines if line["hosts"] == most]
    table.show(some, columns, f"held out, {most} hosts")


def ranges_of(lines: list[dict]) -> dict[str, tuple[float, float]]:
    """For each scheme the least and the most of measured over predicted times."""
    ratios: dict[str, list[float]] = {}
    for line in lines:
        ratios.setdefault(line["scheme"], []).append(line["ratio"])
    return {name: (min(of), max(of)) for name, of in ratios.items()}


def show_kinds(kinds: dict[str, model.Collective], title: str) -> None:
    """Prints what collectives take."""
    rows = [{"kind": kind} | kinds[kind]._asdict() for kind in KINDS if kind in kinds]
    columns = [
        Column("collective", "kind"),
        Column("cpu us", "fixed", ",.0f", 1e6),
        Column("a message us", "a_message", ",.0f", 1e6),
        Column("a MB us", "a_byte", ",.0f", 1e12),
        Column("share", "share", ".2f"),
        Column("stretch", "stretch", ".2f"),
        Column("wake us", "wake", ",.0f", 1e6),
    ]
    table.show(rows, columns, title)


def on_cpus(given: Settings, works: dict, kinds: dict, ranges: dict) -> Iterator[dict]:
    """The model's times on hosts with cores of their own."""
    most = max(given.hosts)
    for name in given.workloads:
        for hosts in (1 << k for k in range(1, most.bit_length())):
            for scheme, work in works.items():
                found = rounds.of_step(scheme, *sets_of(name, hosts))
                bytes_sent = model.sent(found, hosts)
                for gbit in given.gbits:
                    here = Here(hosts, 1e9 * gbit, 1.0)
                    told = model.time(found, work, kinds, here)
                    low, high = ranges[scheme]
                    yield {
                        "work": "this CPU",
                        "workload": name,
                        "scheme": scheme,
                        "hosts": hosts,
                        "gbit_per_s": gbit,
                        "bytes": bytes_sent,
                        "collectives": len(found),
                        "link_s": 8 * bytes_sent / here.rate,
                        "seconds": told,
                        "low_s": low * told,
                        "high_s": high * told,
                    }


if __name__ == "__main__":
    sys.exit(main())
