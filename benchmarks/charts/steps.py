"""Charts of whole training steps on a limited network, and of loss over the clock."""

import statistics

from benchmarks.charts.chart import Chart, Panel, mbit, named, series, spread
from benchmarks.harness import results


RATE = "250mbit"
TIMES = "times as fast as dense"
# What sides of records are called.
SIDES = {
    "zen": "zen_sync",
    "rows": "zen_sync, lazy",
    "rows, gathered": "rows, gathered",
    "embrace": "EmbRace",
    "PyTorch, sparse": "PyTorch, sparse",
    "ok_topk": "ok_topk_sync",
    "spardl": "spardl_sync",
    "dragonn": "dragonn, zen_sync",
    "dgc": "dgc, zen_sync",
}


def gains() -> Chart:
    """Three gains, for those who come for the first time."""
    jit, examples = results.read("in-jit-network-jax0.10.2"), _examples()
    rounds = results.read("local-steps-network-jax0.10.2")
    of_jit = {"model": "language", "shards": "rows", "rate": RATE}
    under_jit = jit.one(**of_jit, scheme="jit, sparse")
    hosts = under_jit["hosts"]
    ours = [
        (
            f"jit and FSDP: language model,\n{hosts} hosts of 2 devices",
            statistics.median(under_jit["times_dense"]),
        )
    ]
    theirs = []
    for hosts in (4, 16):
        of = {"example": "language_model", "hosts": hosts}
        at = f"embedding tables:\nlanguage model, {hosts} hosts"
        ours.append((at, _gain(examples, "rows", **of)))
        theirs.append((at, _gain(examples, "PyTorch, sparse", **of)))
    of = {"hosts": 16, "rate": "100mbit", "every": 30}
    pace = {
        side: results.a_step(rounds.one(**of, scheme=side))
        for side in ("sparse_loco", "data_parallel")
    }
    at = f"dense gradients, local steps:\ndecoder, {of['hosts']} hosts, {named(of['rate'])}"
    ours.append((at, pace["data_parallel"] / pace["sparse_loco"]))
    shown = (
        series("sparsejax", ours),
        series("PyTorch, sparse embeddings", theirs, dashed=True),
    )
    return Chart(
        "gains",
        "Steps a second, times dense: under jit with FSDP, of tables, in local steps",
        (Panel("", shown, "steps a second, times dense", kind="bars", mark=1.0),),
        (jit, examples, rounds),
        height=2.5,
    )


def examples() -> Chart:
    """The examples' steps and bytes, by side."""
    found = _examples()
    by_time, by_bytes = {4: [], 16: []}, {4: [], 16: []}
    for row in found.rows:
        of = {"example": row["example"], "hosts": row["hosts"]}
        if row["scheme"] not in SIDES:
            continue
        at = f"{row['example']}: {SIDES[row['scheme']]}"
        dense = found.one(**of, scheme="dense")
        by_time[row["hosts"]].append((at, results.seconds(dense) / results.seconds(row)))
        by_bytes[row["hosts"]].append((at, dense["sent"] / row["sent"]))
    shown = lambda by: tuple(
        series(f"{hosts} hosts", points) for hosts, points in by.items()
    )
    options = {"kind": "bars", "mark": 1.0}
    return Chart(
        "examples",
        "Steps a second and bytes of each example against dense gradients, 4 and 16 hosts",
        (
            Panel("steps a second", shown(by_time), TIMES, **options),
            Panel("bytes", shown(by_bytes), "times fewer than dense", **options),
        ),
        (found,),
        height=6.4,
    )


def same_loss() -> Chart:
    """Loss over the clock."""
    found = results.read("workloads-curves-jax0.10.2")
    panels = []
    for example in dict.fromkeys(row["example"] for row in found.rows):
        shown = [
            series(
                SIDES.get(row["scheme"], "dense gradients"),
                zip(row["elapsed"], row["losses"], strict=True),
                row["scheme"] == "dense",
            )
            for row in found.where(example=example)
        ]
        panels.append(Panel(example, tuple(shown), "loss", "seconds"))
    says = "Loss over the clock on 16 hosts, with dense gradients and with ours"
    return Chart("same_loss", says, tuple(panels), (found,))


def in_jit() -> Chart:
    """Steps under jit with FSDP inside a host, by rate, and what they do to the loss."""
    found = results.read("in-jit-network-jax0.10.2")
    labels = {
        "jit, sparse": "jit",
        "shard_map, sparse": "shard_map",
        "jit, rows": "jit, tables by rows",
    }
    panels = []
    for model, title in (
        ("language", "language model, zen_sync"),
        ("decoder", "decoder, dgc and zen_sync"),
    ):
        shown = []
        for side, label in labels.items():
            rows = found.where(model=model, shards="rows", scheme=side)
            rows.sort(key=lambda row: mbit(row["rate"]))
            points = [spread(mbit(row["rate"]), row["times_dense"]) for row in rows]
            if points:
                shown.append(series(label, points, side == "shard_map, sparse"))
        panels.append(
            Panel(title, tuple(shown), TIMES, "Mbit/s of a link", log="both", mark=1.0)
        )
    says = "Times of a sparse step over a dense one under jit and in shard_map, by rate"
    return Chart("in_jit", says, tuple(panels), (found,))


def rows() -> Chart:
    """Tables by rows: whole steps on a network, and a step in one process."""
    steps, alone = results.read("end-to-end-jax0.10.2"), results.read("rows-jax0.10.2")
    sides = ("rows", "rows, gathered", "PyTorch, sparse")
    by_side = {side: [] for side in sides}
    for row in steps.rows:
        of = {key: row[key] for key in ("task", "about", "hosts")}
        # Of 16 hosts with a table of clicks there is no dense side: it was not run.
        if row["scheme"] in sides and steps.where(**of, scheme="dense"):
            about = row["about"].removesuffix(", zipf ids")
            at = f"{row['task']}, {about},\n{row['hosts']} hosts"
            by_side[row["scheme"]].append((at, _gain(steps, row["scheme"], **of)))
    here = {"exact": "lazy", "touched": "lazy, exact=False"}
    in_one = [
        series(
            label,
            [
                (f"{row['rows']:,} rows,\n{row['ids']} ids", row["times_as_fast"])
                for row in alone.where(side=side)
            ],
            side != "exact",
        )
        for side, label in here.items()
    ]
    shown = [series(SIDES[side], found, side != "rows") for side, found in by_side.items()]
    options = {"kind": "bars", "mark": 1.0}
    return Chart(
        "rows",
        "Tables by rows: times dense of whole steps on a network and in one process",
        (
            Panel(f"steps, {named(RATE)}", tuple(shown), TIMES, **options),
            Panel("one process, no network", tuple(in_one), TIMES, **options),
        ),
        (steps, alone),
        height=3.6,
    )


def embrace() -> Chart:
    """EmbRace against its baselines."""
    found = results.read("embrace-network-jax0.10.2")
    gains, held = [], []
    for task in ("language", "translation"):
        for hosts in (4, 16):
            shown = [
                row
                for row in found.where(task=task, hosts=hosts)
                if "gain" in row and row.get("stall") is not None
            ]
            label = f"{task}, {hosts} hosts"
            at = lambda row: row["scheme"]
            gains.append(series(label, [(at(row), row["gain"]) for row in shown]))
            stall = [(at(row), 1e3 * row["stall"]) for row in shown]
            held.append(series(label, stall))
    options = {"kind": "dots", "log": "value"}
    return Chart(
        "embrace",
        "EmbRace and its baselines: steps a second, and the computation stall",
        (
            Panel(
                "steps a second", tuple(gains), "of the best baseline", mark=1, **options
            ),
            Panel("computation stall", tuple(held), "ms a step", **options),
        ),
        (found,),
        height=3.2,
    )


def _examples():
    return results.read("workloads-network-jax0.10.2")


def _gain(found, side, **of):
    return results.seconds(found.one(**of, scheme="dense")) / results.seconds(
        found.one(**of, scheme=side)
    )
