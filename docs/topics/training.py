"""What sends a part of a dense gradient, or sends seldom: times, bytes and losses."""

import statistics

from gains import MORE_RANKS, above_data_parallel

from benchmarks.charts import selecting as charts
from benchmarks.charts.chart import mbit, named
from topics.words import between, listed


def local_steps():
    chart = charts.local_steps()
    trained, paced = chart.files
    row = trained.one(**charts.COMPARED, side="sparse_loco", seed=0)
    dense = trained.one(**charts.COMPARED, side="data_parallel", seed=0)
    many = paced.one(**charts.PACED, scheme="data_parallel")
    hosts, rate = f"{many['hosts']} hosts", named(many["rate"])
    pace = lambda label: chart.value(label, f"{hosts}, {rate}", 1)
    worse = above_data_parallel(trained)
    diloco = above_data_parallel(trained, "diloco")
    more = above_data_parallel(trained, ranks=MORE_RANKS)
    spreads = [p for series in chart.panels[1].series for p in series.points]
    widest = max(spreads, key=lambda p: (p.high - p.low) / p.value)
    ran = [
        f"{r['hosts']} hosts, {named(r['rate'])}"
        for r in paced.where(**charts.PACED, scheme="diloco")
    ]
    cells = lambda label: [chart.value(label, place, 1) for place in ran]
    text = f"""SparseLoCo sends {dense["bytes"] / row["bytes"]:,.0f} times fewer bytes than
data parallelism for the same number of tokens, and on {hosts} at {rate} trains at
{pace("SparseLoCo"):.2f} of the pace of steps without an exchange, where data parallelism
has {pace("data parallel"):.2f}. The dense exchange of DiLoCo costs more of the pace
({between(cells("DiLoCo"), 2)}), and overlapped with the steps less
({between(cells("DiLoCo, overlapped"), 2)}).

**Limits.** The loss is higher: after the same number of tokens SparseLoCo ends
{listed([f"{x:.1%}" for x in worse])} above data parallelism on {len(worse)} seeds, and
DiLoCo {listed([f"{x:.1%}" for x in diloco])} on {len(diloco)}. On {MORE_RANKS} ranks data
parallelism has twice the batch, and SparseLoCo ends
{listed([f"{x:.1%}" for x in more])} above it. Repetitions of
one configuration differ, by as much as {widest.low:.2f} to {widest.high:.2f}: the hosts
share two cores, and an exchange takes processor time from the steps."""
    conditions = f"""Left: a decoder, {row["steps"]} steps on eight simulated ranks in
rounds of {row["every"]}, the mean of all seeds. Right: rounds of {many["every"]} steps,
medians of turns with the least and the largest."""
    tables = ["The loss of local steps", "Local steps on a limited network"]
    return "Local steps", text, chart, conditions, tables


def local_clock():
    chart = charts.local_clock()
    told = []
    for panel in chart.panels:
        points = {series.label: series.points for series in panel.series}
        ours, dense = points["SparseLoCo"][-1], points["data parallel"]
        reached = [point for point in dense if point.at <= ours.at]
        beside = f"{reached[-1].value:.2f}" if reached else "not yet evaluated"
        told.append(
            f"{panel.title}: {ours.at:,.0f} seconds, loss {ours.value:.2f}, data "
            f"parallelism after as long {beside}, and {dense[-1].value:.2f} after "
            f"{dense[-1].at:,.0f}"
        )
    text = f"""The same runs over the clock. All steps of SparseLoCo, by hosts and rate:
{"; ".join(told)}.

**Limits.** Losses are of simulated ranks, and seconds of a step were measured on hosts that
share two cores, so a step takes as long as the work of all hosts does. With faster
processors the network counts for more."""
    conditions = f"""Mean losses of all seeds over steps times the seconds of a step, in
rounds of {charts.COMPARED["every"]} steps."""
    tables = ["The loss of local steps", "Local steps on a limited network"]
    return "Local steps over the clock", text, chart, conditions, tables


def selecting():
    chart = charts.systems()
    label_of = lambda network: f"{network[0]} hosts, {named(network[1])}"
    labels = [*map(label_of, charts.LIMITED)]
    *_, unlimited = map(label_of, charts.UNLIMITED)
    ms = lambda label, side: chart.value(label, side)
    at = lambda label: label.replace(", ", " at ")

    def over(side, panel):
        """The dense sum over a system, wherever that was run on a slow network."""
        of = [label for label in labels if side in chart.points(label, panel)]
        values = (chart.points(label, panel) for label in of)
        return between([x["psum"].value / x[side].value for x in values])

    fastest = named(max((rate for _, rate in charts.LIMITED), key=mbit))
    slower = [
        at(label)
        for label in labels
        if "spardl" in chart.points(label) and ms(label, "spardl") > ms(label, "ok_topk")
    ]
    below = [
        f"`{side}` on {at(label)}"
        for label in labels
        for side, point in chart.points(label).items()
        if point.value > ms(label, "psum")
    ]
    text = f"""One number in a hundred of a dense gradient: Ok-Topk sends
{over("ok_topk", 1)} times fewer bytes than an all-reduce, and SparDL {over("spardl", 1)}.
By the clock, at {fastest} and less, Ok-Topk is {over("ok_topk", 0)} times as fast, and
SparDL {over("spardl", 0)}.

**Limits.** On a fast network the dense sum is faster: on {at(unlimited)} it takes
{ms(unlimited, "psum"):.0f} ms, and Ok-Topk {ms(unlimited, "ok_topk"):.0f}. It is faster
than {listed(below)}, too. SparDL sends less than Ok-Topk and takes longer, on
{listed(slower)}: it selects from each block before it sends it, and all hosts do so on two
cores."""
    conditions = f"""Means of the turns, selection included. SparDL, `topk_dsa` and gTopk
were run on some of the networks each. At {named(charts.UNLIMITED[0][1])} no host waits for
its link."""
    title = "Selecting while reducing: Ok-Topk, SparDL"
    return title, text, chart, conditions, [title]


def losses():
    chart = charts.accuracy()
    _, own = chart.files
    label = chart.panels[0].series[0].label
    systems, sparsifiers = chart.points(label), chart.points(label, 1)
    above = [p.value / systems["dense"].value - 1 for p in systems.values()]
    others = [p.value for p in sparsifiers.values() if p.at != "dense"]
    assert min(others) > sparsifiers["dense"].value
    assert min(p.value for p in systems.values()) == systems["dense"].value
    lost = statistics.mean(own.one(part="text", name="random_k")["loss"])
    dense, masked = sparsifiers["dense"].value, sparsifiers["dgc, its momentum"].value
    kept = sparsifiers["dgc, its momentum, not masked"].value
    near = [
        p.value / dense - 1
        for p in sparsifiers.values()
        if p.at in ("dgc", "top_k", "dragonn")
    ]
    text = f"""To send one number in a hundred changes the training. After
{charts.STEPS_OF_SYSTEMS} steps systems that select end up to {max(above):.1%} above the
loss of dense gradients; `dgc`, `top_k` and `dragonn` end
{between([100 * x for x in near])}% above it after {own.where(part="text")[0]["steps"]}.

**Limits.** None reaches dense. The momentum of DGC as published, masked, ends at
{masked:.2f} where dense has {dense:.2f}; not masked it ends at {kept:.2f}. `random_k`,
which is not in the chart, ends at {lost:.0f}: it sends each number once in a hundred steps.
A few hundred steps are the beginning of a training."""
    conditions = f"""Language model, four ranks, one number in a hundred, a momentum of
{charts.MOMENTUM}."""
    tables = ["Training with systems that select", "Training with sparsifiers"]
    return "Training with a part of the gradient", text, chart, conditions, tables


def sparsifiers():
    chart = charts.sparsifiers()
    labels = [series.label for series in chart.panels[0].series]
    ratio = {
        (side, label): chart.value(label, side) / chart.value(label, "dragonn")
        for side in ("dgc", "top_k", "dgc by nonzero", "one read")
        for label in labels
    }
    of = lambda side: [ratio[side, label] for label in labels]
    lost = [label.replace(", ", " at ") for label in labels if ratio["dgc", label] < 1]
    reads = [1 / x for x in of("one read")]
    text = f"""To select takes time on the device. Compared with DRAGONN `top_k` takes
{between(of("top_k"))} times as long, and DGC as it is published (`by nonzero`)
{between(of("dgc by nonzero"))} times. This library's own `dgc` takes
{between(of("dgc"), 2)} times as long.

**Limits.** For {listed(lost)} DRAGONN takes longer than `dgc`, and it takes
{between(reads)} times as long as to read the numbers once: on a CPU its hash scatters over
a memory that no cache holds."""
    conditions = "A vector of normally distributed numbers, on two cores."
    return "Sparsifiers", text, chart, conditions, ["Sparsifiers", "Kernels, on a CPU"]
