"""One sum on a limited network."""

import math

from recorded import digits, seconds, times

from benchmarks.charts import sums as charts
from benchmarks.charts.chart import named
from topics.words import between, listed


RATE = named(charts.RATE)


def on_a_network():
    chart = charts.sums()
    (found,) = chart.files
    by_set = {series.label: chart.points(series.label) for series in chart.panels[0].series}
    few, many = min(by_set["lstm"]), max(by_set["lstm"])
    rows = [of for name, of in by_set.items() if name != "topk"]
    at = lambda hosts: between([of[hosts].value for of in rows])
    rates = chart.points(f"{many} hosts", 1)
    of = {"hosts": many, "rate": charts.RATE, "scheme": "zen"}
    table, numbers = (found.one(workload=name, **of) for name in ("lstm", "topk"))
    sizes = {name: _mib(found.where(workload=name)[0]) for name in by_set}
    small = [f"`{name}`" for name, size in sizes.items() if size < sizes["lstm"]]
    text = f"""Zen adds up the rows of a table {at(few)} times as fast as `lax.psum` on
{few} hosts, and {at(many)} times as fast on {many}, at {RATE}. A faster link leaves less to
gain: on {many} hosts the sum of `lstm` is {times(rates[min(rates)].value)} times as fast at
{min(rates)} Mbit/s, and {times(rates[max(rates)].value)} times at {max(rates):,}.

**Limits.** Single numbers gain the least: `topk`, {numbers["density"]:.0%} of them on a
rank and {numbers["after"]:.0%} in the sum, is {times(by_set["topk"][many].value)} times as
fast on {many} hosts. And on {many} hosts most of the time is work: the bytes of `lstm` take
{1e3 * table["network"]:.0f} of {1e3 * seconds(table):.0f} ms."""
    conditions = f"""An array of {sizes["lstm"]} MiB, and one of {sizes["clicks"]} MiB for
{listed(small)}, whose sets were recorded from training. Each sum was compared with that of
float64. On four hosts Zen was `Zen("fastest")`, which is not the default."""
    return (
        "Sums on a limited network",
        text,
        chart,
        conditions,
        ["Sums on a limited network"],
    )


def by_scheme():
    chart = charts.schemes()
    lines = []
    for number, panel in enumerate(chart.panels):
        ahead = {}
        for series in panel.series:
            of = chart.points(series.label, number)
            best = max(of.values(), key=lambda point: point.value)
            if best.at != "zen":
                ahead[series.label] = best.at, best.value / of["zen"].value
        others = dict.fromkeys(f"`{side}`" for side, _ in ahead.values())
        most = max(ratio for _, ratio in ahead.values())
        sets = len(panel.series)
        lines.append(
            f"On {panel.title} Zen is the fastest for {sets - len(ahead)} of {sets} sets; "
            f"for the others {' or '.join(others)} is, by up to {most:.2f} times."
        )
    last = chart.panels[-1]
    slow = [
        f"`{p.at}`"
        for p in chart.points("topk", 1).values()
        if p.value < 1 and p.at in EXACT
    ]
    text = f"""{" ".join(lines)}

**Limits.** For single numbers (`topk`) on {last.title} {listed(slow)} are slower than the
dense sum. On few hosts it may be faster to send all lists to all: Zen agrees on
sizes before it sends, which takes a round."""
    conditions = f"""Times are over `lax.psum`, at {RATE}. The sides of gloo are PyTorch's,
and ran after the others. On four hosts Zen was `Zen("fastest")`, which is not the
default."""
    return "By scheme", text, chart, conditions, ["By scheme"]


# Sides that send something else than all numbers.
EXACT = (
    "hierarchical",
    "agsparse",
    "sparcml",
    "omnireduce",
    "gloo sparse",
    "gloo all-gather",
)


def by_density():
    chart = charts.density()
    timed, _ = chart.files
    hosts = sorted({row["hosts"] for row in timed.rows})
    of = lambda side, n: [p.value for p in chart.points(f"{side}, {n} hosts").values()]
    shares = [*chart.points(f"zen, {hosts[0]} hosts")]
    pairs = [zip(of("zen", n), of("gloo sparse", n), strict=True) for n in hosts]
    ahead = all(ours > theirs for pair in pairs for ours, theirs in pair)
    sent, dense, least = (chart.points(x, 1) for x in ("sent", "all-reduce", "entropy"))
    over = [sent[at].value / least[at].value for at in sent]
    most = max(sent[at].value / dense[at].value for at in sent)
    ends = lambda n: f"{times(max(of('zen', n)))} to {times(min(of('zen', n)))}"
    text = f"""The fuller a gradient, the less there is to gain. From {min(shares):.1f}% to
{max(shares):.0f}% of the rows on a rank Zen falls from {ends(hosts[0])} times as fast as
`lax.psum` on {hosts[0]} hosts, and from {ends(hosts[-1])} times on {hosts[-1]}. It is
{"faster than" if ahead else "**not always faster than**"} gloo's sparse all-reduce at each
density. The bytes that a rank sends, padding included, are {min(over):.2f} to
{max(over):.2f} times those below which no lossless code can be, and at most {most:.2f}
times those of an all-reduce."""
    numbers = math.prod(timed.rows[0]["shape"])
    conditions = f"""Left: an array of {numbers:,} numbers, whose rows all ranks draw from
one law, at {RATE}. Right: single numbers on eight simulated ranks, push and pull together.
COO and the hash bitmap are formats of papers for the same sets, without padding, and the
entropy is the values and that of the sets."""
    return "Density and bytes", text, chart, conditions, ["By density", "Bytes"]


def without_zeros():
    chart = charts.no_zeros()
    (found,) = chart.files
    full, tiny = (series.label for series in chart.panels[0].series)
    of = {"workload": "tiny", "hosts": 1}
    before, after = (
        digits(1e3 * seconds(found.one(**of, scheme=side)), 2) for side in ("psum", "zen")
    )
    ratios = [p.value for p in chart.points(full).values()]
    text = f"""Where nothing is zero Zen falls back to the dense sum. What remains is the
search for zeros, and the agreement that there are none: {full} take {between(ratios, 2)}
times as long as with `lax.psum`.

**Limits.** In one process, without a network, {tiny} take {after} ms instead of {before}.
By default leaves as small as that are not searched."""
    conditions = f"The line is `lax.psum`. Links have {RATE}."
    title = "Where sparsity does not help"
    return title, text, chart, conditions, [title]


def _mib(row):
    return 4 * math.prod(row["shape"]) >> 20
