"""Charts of what sends a part of a dense gradient: times, bytes and losses."""

import itertools
import statistics

from benchmarks.charts.chart import Chart, Panel, Point, mbit, named, series, spread
from benchmarks.harness import results
from benchmarks.training import local_steps_clock as clock


# Hosts, and rates. At the rates of the second ones a host never waits for its link.
LIMITED = ((14, "250mbit"), (14, "50mbit"), (16, "50mbit"), (16, "25mbit"))
UNLIMITED = ((14, "100gbit"), (16, "100gbit"))


def systems() -> Chart:
    """Milliseconds and bytes of systems that select while they reduce."""
    found = results.read("choosing-network-jax0.10.2")
    sides = ("psum", "topk_a", "topk_dsa", "gtopk", "ok_topk", "spardl")
    times, sent = [], []
    for hosts, rate in (*LIMITED, *UNLIMITED):
        label = f"{hosts} hosts, {named(rate)}"
        rows = {row["scheme"]: row for row in found.where(hosts=hosts, rate=rate)}
        ran = [side for side in sides if side in rows]
        ms = lambda side, rows=rows: 1e3 * statistics.mean(rows[side]["seconds"])
        times.append(series(label, [(side, ms(side)) for side in ran]))
        sent.append(series(label, [(side, rows[side]["sent"] / 1e6) for side in ran]))
    options = {"kind": "dots", "log": "value"}
    return Chart(
        "systems",
        "Milliseconds and megabytes of one sum of selected numbers, by system",
        (
            Panel("time", tuple(times), "ms", **options),
            Panel("bytes of a host", tuple(sent), "MB", **options),
        ),
        (found,),
        height=2.9,
    )


STEPS_OF_SYSTEMS = 200
MOMENTUM = 0.9


def accuracy() -> Chart:
    """Losses after a few hundred steps, with their spread over seeds."""
    found = results.read("choosing-training-jax0.10.2")
    of = {"part": "convergence", "optimizer": "momentum", "task": "text"}
    own = results.read("sparse-training-jax0.10.2")
    rows = found.where(**of, steps=STEPS_OF_SYSTEMS)
    rows = {row["name"]: row["loss"] for row in rows}
    others = {row["name"]: row["loss"] for row in own.where(part="text")}
    (steps,) = {row["steps"] for row in own.where(part="text")}
    # Its loss is eight times that of the others, and said in the text.
    others.pop("random_k")
    options = {"kind": "dots", "value": "loss on other text"}
    return Chart(
        "accuracy",
        "Loss on other text after a few hundred steps, by system and by sparsifier",
        (
            Panel(f"systems, {STEPS_OF_SYSTEMS} steps", (_losses(rows),), **options),
            Panel(f"sparsifiers, {steps} steps", (_losses(others),), **options),
        ),
        (found, own),
        height=3.2,
    )


def _losses(rows):
    points = []
    for name, losses in rows.items():
        mean, deviation = statistics.mean(losses), statistics.pstdev(losses)
        points.append(Point(name, mean, mean - deviation, mean + deviation))
    return series("mean of three seeds, and a deviation on either side", points)


LOCAL = {
    "alone": "no exchange",
    "data_parallel": "data parallel",
    "dgc": "DGC",
    "average": "local AdamW, averaged",
    "diloco": "DiLoCo",
    "streaming": "Streaming DiLoCo",
    "sparse_loco": "SparseLoCo",
    "wide": "SparseLoCo, 256 of 4,096",
    "bins": "SparseLoCo, the authors' code",
    "ranks": "SparseLoCo, over all ranks",
    "demo": "DeMo",
    "delayed": "DiLoCo, delayed",
    "overlap": "DiLoCo, overlapped",
}
# The runs whose losses are compared, and the rounds whose pace is.
COMPARED, PACED = {"ranks": 8, "every": 5, "steps": 400, "tuning": False}, {"every": 30}


def local_steps() -> Chart:
    """Loss over bytes of local steps, and their pace on a network."""
    trained = results.read("local-steps-jax0.10.2")
    paced = results.read("local-steps-network-jax0.10.2")
    losses = []
    for side, label in LOCAL.items():
        if rows := trained.where(**COMPARED, side=side):
            means = map(statistics.fmean, zip(*(r["losses"] for r in rows), strict=True))
            sent = [x / 1e6 for x in rows[0]["sent"]]
            losses.append(series(label, zip(sent, means, strict=True)))
    paces = {}
    for row in paced.where(**PACED):
        if row["scheme"] == "alone":
            continue
        at = f"{row['hosts']} hosts, {named(row['rate'])}"
        paces.setdefault(row["scheme"], []).append(spread(at, row["of_alone"]))
    shown = [series(LOCAL[side], paces[side]) for side in LOCAL if side in paces]
    return Chart(
        "local_steps",
        "Loss over the megabytes sent by local steps, and their pace on a network",
        (
            Panel("held-out loss", tuple(losses), "loss", "MB sent", log="at"),
            Panel(
                "pace, of steps without an exchange",
                tuple(shown),
                "share of the pace",
                kind="bars",
                mark=1.0,
            ),
        ),
        (trained, paced),
        height=3.6,
    )


def local_clock() -> Chart:
    """Loss over the clock of local steps, by the rate of the links."""
    trained = results.read("local-steps-jax0.10.2")
    paced = results.read("local-steps-network-jax0.10.2")
    hosts = COMPARED["ranks"]
    lines = [
        line
        for line in clock.lines(trained.where(**COMPARED), paced.rows)
        if line["hosts"] == hosts
    ]
    panels = []
    for rate in sorted({line["rate"] for line in lines}, key=mbit):
        shown = []
        for side, label in LOCAL.items():
            own = [line for line in lines if (line["side"], line["rate"]) == (side, rate)]
            if own:
                shown.append(series(label, [(x["seconds"], x["loss"]) for x in own]))
        at = f"{hosts} hosts, {named(rate)}"
        panels.append(Panel(at, tuple(shown), "held-out loss", "seconds", log="at"))
    says = "Held-out loss over the clock of local steps, by the rate of the links"
    return Chart("local_clock", says, tuple(panels), (trained, paced))


def sparsifiers() -> Chart:
    """Milliseconds to select."""
    found = results.read("sparsifiers-jax0.10.2")
    names = ("dragonn", "dgc", "top_k", "dgc by nonzero", "one read")
    cases = itertools.product((1 << 24, 1 << 27), (0.001, 0.01))
    shown = []
    for size, density in cases:
        points = []
        for name in names:
            row = found.one(part="encode", name=name, size=size, density=density)
            points.append((name, 1e3 * statistics.median(row["seconds"])))
        shown.append(series(f"{size >> 20} M numbers, {density:.1%}", points))
    panel = Panel("", tuple(shown), "ms", kind="dots", log="value")
    says = "Milliseconds to select entries on two cores, by sparsifier"
    return Chart("sparsifiers", says, (panel,), (found,), height=2.1)
