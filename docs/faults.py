"""How well training goes on when things break, from benchmarks/results: faults.md.

`python docs/performance.py` writes the page. Each row of its first table is made from the
rows of a result file, whichever systems, faults and seeds these are of; what was not as
promised is counted, and listed with its own words.
"""

import math
import textwrap

from recorded import ROOT, Results, digits, seconds, table

from benchmarks.faults.kinds import FAULTS
from benchmarks.faults.settings import SCHEMES


PAGE = ROOT / "docs" / "faults.md"
FAULT, LONG_RUN = "python -m benchmarks.faults", "python -m benchmarks.faults.long_run"
REPLICAS, CHECKPOINTS, LARGEST = (
    f"python -m benchmarks.training.{name}"
    for name in ("replicas", "checkpoints", "largest")
)
FUZZ = "make fuzz ARGS=--record"
ADDED = 0.01  # of a step, what comparing replicas may cost

LAWS = {
    "sum": "an array's sum over ranks is NumPy's in float64, and the same bytes on all",
    "tree": "leaves of gradients come out as updates, or ranks hold them",
    "chosen": "each rank gets back what it leaves out of a sum, step by step",
    "entries": "entries of one index add up, those out of range are left out",
    "rows": "rows that any rank lists come back, once each",
    "messages": "what is packed is unpacked, for any message",
}


def counted(good, all_of):
    """A count and its total; in bold where it is not all."""
    text = f"{good:,} of {all_of:,}"
    return text if good == all_of else f"**{text}**"


def promised(rows):
    return counted(sum(not row["wrong"] for row in rows), len(rows))


def lost(rows):
    """The largest relative loss; of how many rows, where not all came so far."""
    known = [row["lost"] for row in rows if "lost" in row]
    if not known:
        return ""
    part = f" (of {len(known)})" if len(known) < len(rows) else ""
    return f"{max(known):.0e}{part}"


def befalls(row):
    fault = FAULTS[row["fault"]]
    return fault.text.format(seconds=fault.seconds(row["silence"]))


def in_order(found, known):
    """Each once: what is known in that order, then what is not."""
    return sorted(set(found), key=lambda x: (known.index(x) if x in known else 99, x))


class Records:
    """The result files of the page."""

    def __init__(self):
        self.fuzz = Results("fuzz-jax0.10.2", by=FUZZ)
        self.faults = Results("faults-jax0.10.2", by=FAULT)
        self.long_run = Results("long-run-jax0.10.2", by=LONG_RUN)
        self.replicas = Results("replicas-jax0.10.2", by=REPLICAS)
        self.checkpoints = Results("checkpoints-jax0.10.2", by=CHECKPOINTS)
        self.largest = Results("largest-jax0.10.2", by=LARGEST)
        self.kinds = in_order((row["fault"] for row in self.faults.rows), [*FAULTS])
        schemes = (row["scheme"] for row in self.faults.rows)
        self.schemes = in_order(schemes, [*SCHEMES])

    def sources(self):
        files = (
            *(self.fuzz, self.faults, self.long_run),
            *(self.replicas, self.checkpoints, self.largest),
        )
        return "\n\n".join(each.source() for each in files)


# --- Rows of the first table: what was tried, how much, as promised, the result, and the
# --- largest loss.


def of_fuzzing(records):
    every = records.fuzz.one(law="all")
    laws = [row for row in records.fuzz.rows if row["law"] != "all"]
    ways = sum(len(row["ways"]) for row in laws)
    missed = len(every["missed"])
    missing = f"**{missed} missing**" if missed else "none missing"
    yield [
        "randomized cases, checked against the invariants",
        f"{every['cases']:,} cases of {len(laws)} invariants, "
        f"{every['programs']:,} programs",
        counted(every["cases"] - every["failures"], every["cases"]),
        f"{ways} code paths covered; of the required ones, {missing}",
        "" if every["failures"] else "rounding",
    ]


def of_faults(records):
    for kind in records.kinds:
        rows = records.faults.where(fault=kind)
        hosts = " or ".join(str(n) for n in sorted({row["hosts"] for row in rows}))
        systems, seeds = (len({row[key] for row in rows}) for key in ("scheme", "seed"))
        drawn = f", {seeds} seeds" if seeds > 1 else ""
        yield [
            f"one host {befalls(rows[0])}",
            f"{len(rows)} jobs of {hosts} hosts, {systems} systems{drawn}",
            promised(rows),
            became(rows),
            lost(rows),
        ]


def became(rows):
    """How long it took until all hosts had ended, and how many continued."""
    fault = FAULTS[rows[0]["fault"]]
    on = counted(sum("lost" in row for row in rows), len(rows))
    if not fault.ends:
        return f"{on} continued to the last step"
    ended = max((row["ended"] for row in rows if "ended" in row), default=float("inf"))
    within = max(fault.within(row["silence"]) for row in rows)
    last = f"{ended:.1f} s" if ended <= within else f"**{ended:.1f} s**"
    hung = sum("hung" in row["wrong"] for row in rows)
    parts = [
        f"all hosts ended in {last} at most, {within:g} s promised",
        f"**{hung} hung**" if hung else "none hung",
        f"{on} continued from a checkpoint",
    ]
    if aborted := sum(len(row.get("aborted", ())) for row in rows):
        parts.append(f"gloo or JAX aborted {aborted} processes first")
    return "; ".join(parts)


def of_long_runs(records):
    for row in records.long_run.rows:
        samples = len(row.get("memory", ()))
        yield [
            f"`{row['scheme']}`, a long run without a fault",
            f"{row['steps']:,} steps on {row['hosts']} processes, {samples} checkpoints",
            promised([row]),
            f"memory grew by {row['grown']:.1%} at most, {row['compiled']} programs "
            "compiled after the first checkpoint"
            if samples
            else "",
            lost([row]),
        ]


def of_replicas(records):
    rows = records.replicas.rows
    added = [row["added"] for row in rows]
    yield [
        "one bit of a replica is flipped",
        f"{len(rows)} training runs",
        counted(sum(x <= ADDED for x in added), len(rows)),
        "detected; to compare at every 100th step adds "
        f"{min(added):.2%} to {max(added):.2%} of a step, {ADDED:.0%} promised",
        "",
    ]


def of_checkpoints(records):
    rows = records.checkpoints.rows
    largest = max(row["bytes"] for row in rows)
    times = [
        f"{row['side']} {seconds(row):.2f} s" for row in rows if row["bytes"] == largest
    ]
    yield [
        "states are saved, and restored on as many ranks and on others",
        f"{len({row['bytes'] for row in rows})} sizes, to {largest / 1e6:,.0f} MB",
        counted(sum(row["growth"] <= 1 for row in rows), len(rows)),
        f"the same bytes; the largest: {', '.join(times)}; promised: no more time a MB "
        "than the smallest",
        "",
    ]


def of_largest(records):
    rows = [row for row in records.largest.rows if "needed" not in row or "memory" in row]
    numbers = max(math.prod(row["shape"]) for row in rows)
    memory = max(row.get("memory", 0) for row in rows)
    short = len(records.largest.rows) - len(rows)
    yield [
        "arrays of more bytes than int32 can count, as large as fit",
        f"{len(rows)} exchanges of 2 ranks, {4 * numbers / 1e9:.1f} GB a rank, "
        f"{len({row['scheme'] for row in rows})} schemes",
        promised(rows),
        f"the sum at each place, the same bits on both; {memory / 1e9:.0f} GB of memory at "
        "most" + (f"; {short} more need more than there was" if short else ""),
        "0",
    ]


TRIED = (
    *(of_fuzzing, of_faults, of_long_runs),
    *(of_replicas, of_checkpoints, of_largest),
)


def all_in_one(records):
    rows = [row for tried in TRIED for row in tried(records)]
    head = ["what was tried", "how much", "as promised", "result", "lost at most"]
    return table(head, rows, 5)


# --- What stands below it.


def not_as_promised(records):
    """What was not, each with its own words."""
    for row in records.faults.rows:
        if row["wrong"]:
            yield f"`{row['scheme']}`, {row['fault']}, seed {row['seed']}", row["wrong"]
    for row in records.long_run.rows:
        if row["wrong"]:
            yield f"`{row['scheme']}`, {row['steps']:,} steps", row["wrong"]
    for row in records.largest.rows:
        if row["wrong"]:
            yield f"`{row['scheme']}`, {row['case']} as large as fit", row["wrong"]
    *laws, every = sorted(records.fuzz.rows, key=lambda row: row["law"] == "all")
    failed = {f"randomized cases of `{row['law']}`": row["failures"] for row in laws}
    failed["cases kept from earlier"] = every["failures"] - sum(failed.values())
    yield from ((what, f"{n} failed") for what, n in failed.items() if n)
    yield from (("no randomized case covered this path", way) for way in every["missed"])
    for row in records.replicas.rows:
        if row["added"] > ADDED:
            what = f"to compare replicas, {row['network']}, {row['sync']}"
            yield what, f"{row['added']:.2%} of a step"
    for row in records.checkpoints.rows:
        if row["growth"] > 1:
            what = f"to {row['side']}, {row['bytes'] / 1e6:,.0f} MB"
            yield what, f"{row['growth']:.2f} times the time a MB of the smallest"


def bullets(records):
    lines = [f"* {what}: {said(wrong)}" for what, wrong in not_as_promised(records)]
    return "\n".join(lines) or "Nothing."


def said(text):
    """Words of a record on one line."""
    line = textwrap.shorten(text.replace("\\n", " "), 300, placeholder=" ...")
    return f"`{line.replace('`', chr(39))}`"


def by_kind_and_system(records):
    def cell(rows):
        if not rows:
            return ""
        ended = [row["ended"] for row in rows if "ended" in row]
        return promised(rows) + (f", {max(ended):.1f} s" if ended else "")

    lines = []
    for scheme in records.schemes:
        of = [records.faults.where(fault=kind, scheme=scheme) for kind in records.kinds]
        lines.append([f"`{scheme}`", *map(cell, of)])
    of = [records.faults.where(fault=kind) for kind in records.kinds]
    lines.append(["all", *map(cell, of)])
    return table(["system", *(f"`{kind}`" for kind in records.kinds)], lines)


def by_law(records):
    rows = [
        [
            f"`{row['law']}`",
            LAWS.get(row["law"], ""),
            f"{row['cases']:,}",
            f"**{row['failures']}**" if row["failures"] else 0,
            len(row["ways"]),
        ]
        for row in records.fuzz.rows
        if row["law"] != "all"
    ]
    head = ["invariant", "what holds", "cases", "failed", "code paths covered"]
    return table(head, rows, 2)


def comparing(records):
    rows = [
        [
            f"{row['network']}, {row['sync']}",
            row["leaves"],
            f"{row['numbers'] / 1e6:.1f}",
            *(digits(1e3 * row[key]) for key in ("step", "check")),
            f"{row['added']:.2%}",
        ]
        for row in records.replicas.rows
    ]
    head = ["network", "leaves", "M numbers", "step, ms", "check, ms", "added to a step"]
    return table(head, rows)


def saving(records):
    sides = list(dict.fromkeys(row["side"] for row in records.checkpoints.rows))
    rows = []
    for size in sorted({row["bytes"] for row in records.checkpoints.rows}):
        of = [records.checkpoints.one(side=side, bytes=size) for side in sides]
        each = [f"{1e3 * seconds(row):,.0f} ({1e9 * row['per_byte']:.2f})" for row in of]
        rows.append([f"{size / 1e6:,.0f}", *each])
    return table(["MB", *sides], rows, 0)


def page():
    """The page's text."""
    records = Records()
    jobs = records.faults.rows
    longest = max(row["steps"] for row in records.long_run.rows)
    cases = records.fuzz.one(law="all")["cases"]
    return f"""# It keeps training

<!-- Made by `python docs/performance.py` from benchmarks/results: do not edit. -->

What training does when something breaks, with all recorded figures:
{cases:,} randomized cases, {len(jobs)} jobs with a fault on one host, runs of {longest:,}
steps.

* Where a host is lost, the job has to end on all hosts in the promised time, with the name
  of that host, and the remaining hosts continue from the last checkpoint.
* *Lost* is the largest difference between what was applied plus the residuals and the sum
  of the gradients that were computed, over the sum of their sizes. 1e-05 is promised, and
  the same bytes on all hosts.
* A number in bold is one that is not as promised.

`benchmarks/faults/README.md` says how each was tried, and
[Several hosts](several_hosts.md#when-a-host-is-lost) how to use it in a job of your own.

{all_in_one(records)}

## Not as promised

{bullets(records)}

## By fault and system

The number of jobs that ended as promised, and the longest time until the last host had
ended. Systems and faults have the names that `--schemes` and `--faults` of
`{FAULT}` take.

{by_kind_and_system(records)}

## Randomized cases, by invariant

{by_law(records)}

## Comparing replicas

The time to compare a whole state on four simulated devices, where a step has eight
examples a rank. Each training run began with a flipped bit, which was detected.

{comparing(records)}

## Saving and restoring

Milliseconds to save a state of four ranks, to restore it on four, where every byte was
compared, and to restore it on two. In brackets: milliseconds a MB.

{saving(records)}

## Where this is from

{records.sources()}
"""
