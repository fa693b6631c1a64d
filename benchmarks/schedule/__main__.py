"""`python -m benchmarks.schedule`: which exchanges may overlap which computations.

A side carries the last so many blocks of a forward into the next step, and reduces the
others in the backward; 0 is the step without horizontal scheduling. And it holds so many
rows of the table of words back, at most; 0 is the step without vertical scheduling. Each is
compiled with the latency-hiding scheduler off, on, and on with the stated costs at a rate
as its profile.
"""

import dataclasses
import functools
import itertools
import sys
import warnings

import jax
import optax

import sparsejax
from benchmarks.harness import settings, table
from benchmarks.harness.record import Recorder, say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.schedule import compiled, model
from benchmarks.schedule.timeline import Costs, Timeline


OFF, ON, PROFILED = "off", "on", "on, profiled"
KEYS = ("carried", "delayed", "hiding", "rate")


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Compiles train steps for described GPUs, and reads how they are scheduled."""

    PROGRAM = "benchmarks.schedule"
    carried: tuple[int, ...] = option((0, 2, 3), "sides: how many blocks are carried")
    delayed: tuple[int, ...] = option((0, 4096), "sides: rows that a rank may hold back")
    prior: float = option(0.5, "the share of rows that are sent at once")
    rates: tuple[int, ...] = option((25, 100), "of a link, in Gbit/s")
    blocks: int = option(2, "of the transformer, beside its head")
    sentences: int = option(64, "of 512 words, a rank")


def chain(carried: int, delayed: int, sizes: model.Sizes) -> optax.GradientTransformation:
    """The optimizer of a side; that of the table takes rows."""
    adam = optax.adam(1e-3)
    each = {"rows": sparsejax.lazy(adam, exact=False), "rest": adam}
    labels = lambda params: {name: _label(name, x) for name, x in params.items()}
    sync = sparsejax.embrace_sync(vertical=bool(delayed), delayed=delayed or 1)
    tx = optax.chain(sync, optax.partition(each, labels))
    if not carried:
        return tx
    order = sizes.order[-carried:]
    at_once = [name for name in sizes.order if name not in order]
    return sparsejax.embrace.horizontal(tx, order, at_once=at_once)


def _label(name, params):
    # All of a table's leaves have one optimizer, as the table itself has.
    if name == "words":
        return "rows"
    return jax.tree.map(lambda _: "rest", params)


def row_of(side: tuple[int, int], hiding: str, rate: int, one: Timeline) -> dict:
    """A row of the results."""
    costs = Costs(rate * 1e9)
    found = one.reductions(costs)
    return {
        "carried": side[0],
        "delayed": side[1],
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
        rows.append(each | {"shown": ", ".join(shown) or "nothing"})
    columns = [
        Column("collective of", "what"),
        Column("sent MB", "sent", ",.1f", 1e-6),
        Column("takes ms", "seconds", ".2f", 1e3),
        Column("waited for ms", "waited", ".2f", 1e3),
        Column("free of it GFLOP", "free", ",.0f", 1e-9),
        Column("between start and done", "shown"),
    ]
    side = f"{row['carried']} carried, {row['delayed']} delayed"
    head = f"{side}, scheduler {row['hiding']}, {row['rate']} Gbit/s"
    table.show(rows, columns, head)


SUMMARY = [
    Column("carried", "carried"),
    Column("delayed", "delayed"),
    Column("scheduler", "hiding"),
    Column("Gbit/s", "rate"),
    Column("step ms", "step", ".1f", 1e3),
    Column("waiting ms", "waiting", ".1f", 1e3),
    Column("computing ms", lambda row: row["step"] - row["waiting"], ".1f", 1e3),
    Column("times as fast as 0, 0", "ratio", ".3f"),
]


def main() -> int:
    warnings.simplefilter("ignore")
    given = Settings.parse()
    sizes = model.Sizes(blocks=given.blocks, sentences=given.sentences)
    mesh = compiled.mesh()
    record = Recorder("schedule", given.command(), KEYS)
    for side in itertools.product(given.carried, given.delayed):
        lowered = model.lowered(chain(*side, sizes), sizes, mesh, has_next=side[1] > 0)
        compile = functools.partial(compiled.timeline, lowered, prior=given.prior)
        off, on = (compile(hiding) for hiding in (False, True))
        for rate in given.rates:
            profiled = compile(True, told=on.seconds(Costs(rate * 1e9)))
            for hiding, one in {OFF: off, ON: on, PROFILED: profiled}.items():
                record.add(**row_of(side, hiding, rate, one))
            show_reductions(record.rows[-1])
        record.write()
    rows = record.all_rows()
    usual = {
        (row["hiding"], row["rate"]): row["step"]
        for row in rows
        if not row["carried"] and not row["delayed"]
    }
    for row in rows:
        before = usual.get((row["hiding"], row["rate"]))
        row["ratio"] = before and before / row["step"]
    rows.sort(key=lambda row: [row[k] for k in ("rate", "hiding", "carried", "delayed")])
    title = f"a step on {compiled.RANKS} H200s, one a host, by stated costs"
    table.show(rows, SUMMARY, title)
    say(f"written: {record.write()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
