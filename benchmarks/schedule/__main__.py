"""`python -m benchmarks.schedule`: which reductions may overlap which forwards.

A side carries the last so many blocks of a forward into the next step, and reduces the
others in the backward; 0 is the step without horizontal scheduling. Each is compiled with
the latency-hiding scheduler off, on, and on with the stated costs at a rate as its profile.
"""

import dataclasses
import sys
import warnings

import optax

import sparsejax
from benchmarks.harness import settings, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.schedule import compiled, model
from benchmarks.schedule.timeline import Costs, Timeline


OFF, ON, PROFILED = "off", "on", "on, profiled"


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Compiles train steps for described GPUs, and reads how they are scheduled."""

    PROGRAM = "benchmarks.schedule"
    carried: tuple[int, ...] = option((0, 2, 3), "sides: how many blocks are carried")
    rates: tuple[int, ...] = option((25, 100), "of a link, in Gbit/s")
    blocks: int = option(2, "of the transformer, beside its head")
    sentences: int = option(64, "of 512 words, a rank")


def chain(carried: int, sizes: model.Sizes) -> optax.GradientTransformation:
    """The optimizer of a side."""
    tx = optax.chain(sparsejax.dense_sync(), optax.adam(1e-3))
    if not carried:
        return tx
    order = sizes.order[-carried:]
    at_once = [name for name in sizes.order if name not in order]
    return sparsejax.embrace.horizontal(tx, order, at_once=at_once)


def row_of(carried: int, hiding: str, rate: int, one: Timeline) -> dict:
    """A row of the results."""
    costs = Costs(rate * 1e9)
    found = one.reductions(costs)
    return {
        "carried": carried,
        "hiding": hiding,
        "rate": rate,
        "step": one.total(costs),
        "waiting": one.waiting(costs),
        "sent": sum(each.sent for each in found),
        "reductions": [each._asdict() for each in found],
        "costs": dataclasses.asdict(costs),
    }


def show_reductions(row: dict) -> None:
    """Prints what lies between the ends of each collective."""
    rows = []
    for each in row["reductions"]:
        between = each["between"].items()
        shown = [f"{w} ({f / 1e9:,.0f} GFLOP)" for w, (f, _) in between if f]
        overlaps = any(w.startswith("forward") and f for w, (f, _) in between)
        rows.append(each | {"shown": ", ".join(shown) or "nothing", "overlaps": overlaps})
    columns = [
        Column("collective of", "what"),
        Column("sent MB", "sent", ",.1f", 1e-6),
        Column("takes ms", "seconds", ".2f", 1e3),
        Column("waited for ms", "waited", ".2f", 1e3),
        Column("free of it GFLOP", "free", ",.0f", 1e-9),
        Column("between start and done", "shown"),
    ]
    head = f"{row['carried']} carried, scheduler {row['hiding']}, {row['rate']} Gbit/s"
    table.show(rows, columns, head)


SUMMARY = [
    Column("carried", "carried"),
    Column("scheduler", "hiding"),
    Column("Gbit/s", "rate"),
    Column("step ms", "step", ".1f", 1e3),
    Column("waiting ms", "waiting", ".1f", 1e3),
    Column("computing ms", lambda row: row["step"] - row["waiting"], ".1f", 1e3),
    Column("times as fast as 0", "ratio", ".3f"),
]


def main() -> int:
    warnings.simplefilter("ignore")
    given = Settings.parse()
    sizes = model.Sizes(blocks=given.blocks, sentences=given.sentences)
    mesh = compiled.mesh()
    record = Recorder("schedule", given.command(), ("carried", "hiding", "rate"))
    for carried in given.carried:
        lowered = model.lowered(chain(carried, sizes), sizes, mesh)
        off, on = (compiled.timeline(lowered, hiding) for hiding in (False, True))
        for rate in given.rates:
            told = on.seconds(Costs(rate * 1e9))
            profiled = compiled.timeline(lowered, True, told)
            for hiding, one in {OFF: off, ON: on, PROFILED: profiled}.items():
                record.add(**row_of(carried, hiding, rate, one))
            show_reductions(record.rows[-1])
        record.write()
    rows = record.all_rows()
    usual = {
        (row["hiding"], row["rate"]): row["step"] for row in rows if not row["carried"]
    }
    for row in rows:
        before = usual.get((row["hiding"], row["rate"]))
        row["ratio"] = before and before / row["step"]
    rows.sort(key=lambda row: (row["rate"], row["hiding"], row["carried"]))
    title = f"a step on {compiled.RANKS} H200s, one a host, by stated costs"
    table.show(rows, SUMMARY, title)
    say(f"written: {record.write()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
