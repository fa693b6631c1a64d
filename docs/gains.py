"""What a visitor asks first: the chart of gains on the first pages, and a table of more."""

import re

from recorded import ROOT, Results, seconds, table, times

from benchmarks.charts import steps as charts
from benchmarks.charts.chart import named
from benchmarks.charts.selecting import COMPARED


GAINS = re.compile(r"(<!-- gains: .*? -->\n).*?(<!-- end of gains -->)", re.S)
# The pages that begin with the chart, and the way from each to the root and to docs/.
PAGES = {
    ROOT / "README.md": ("", "docs/"),
    ROOT / "docs" / "index.md": ("../", ""),
}
# What the files of the chart and of its caption are about.
WHAT = ("under jit", "tables", "local steps", "their loss")


def _in_tables(results, example):
    """The share of an example's numbers that are in its tables."""
    row = results.one(example=example, hosts=16, scheme="dense")
    held = sum(rows * width for rows, width in row["tables"])
    return f"{held / row['numbers']:.0%}"


def section():
    """The title of the table, what it says, the table, and its files."""
    sums, steps = Results("communication-jax0.10.2"), Results("end-to-end-jax0.10.2")
    tables, examples = Results("rows-jax0.10.2"), Results("workloads-network-jax0.10.2")
    network = {"workload": "lstm", "rate": "250mbit"}
    rows = []
    for hosts in (4, 16):
        dense, zen = (
            sums.one(**network, hosts=hosts, scheme=side) for side in ("psum", "zen")
        )
        gain = times(seconds(dense) / seconds(zen))
        name = f"one sum, {zen['density']:.1%} of the rows of a table, {hosts} hosts"
        rows.append([name, "`lax.psum`", f"**{gain}**", sums.name])
    wide, clicks = "tables of 256 columns", "10,000,000 rows, zipf ids"
    model = f"a language model, {_in_tables(examples, 'language_model')} of it tables"
    for of, results, name in (
        (
            {"task": "language", "about": wide, "hosts": 4},
            steps,
            "a language model, 4 hosts",
        ),
        ({"task": "language", "about": wide, "hosts": 16}, steps, "the same, 16 hosts"),
        ({"example": "language_model", "hosts": 16}, examples, f"{model}, 16 hosts"),
        ({"example": "translation", "hosts": 16}, examples, "a translator, 16 hosts"),
        (
            {"task": "clicks", "about": clicks, "hosts": 4},
            steps,
            "a click model of 10 M rows, 4 hosts",
        ),
    ):
        dense, ours, torch = (
            results.one(**of, scheme=side) for side in ("dense", "rows", "PyTorch, sparse")
        )
        beside = times(seconds(dense) / seconds(torch))
        gain = f"**{times(seconds(dense) / seconds(ours))}** (PyTorch, sparse: {beside})"
        rows.append([f"steps a second, {name}", "dense gradients", gain, results.name])
    row = tables.one(rows=10_000_000, ids="zipf", side="exact")
    gain = f"**{times(row['times_as_fast'])}**"
    rows.append(["one step, 10 M rows, no network", "dense Adam", gain, tables.name])
    rows = [[*row[:3], f"`{row[3]}`"] for row in rows]
    head = ["what", "against", "times as fast", "file"]
    text = """How many times as fast training is, in one table, and PyTorch with sparse
embeddings where that was measured."""
    sources = (sums, steps, tables, examples)
    return "Gains", text, table(head, rows, 4), sources


MORE_RANKS = 16  # of the losses that are named beside those of `COMPARED`


def above_data_parallel(losses, side="sparse_loco", ranks=COMPARED["ranks"]):
    """By which share local steps end above data parallelism, by seed."""
    of = COMPARED | {"ranks": ranks}
    dense = {r["seed"]: r["loss"] for r in losses.where(**of, side="data_parallel")}
    rows = losses.where(**of, side=side)
    return [row["loss"] / dense[row["seed"]] - 1 for row in rows]


def chart(root, docs):
    """The chart and its caption, for a page from which the root and docs/ are there."""
    shown = charts.gains()
    losses = Results("local-steps-jax0.10.2")
    worse, more = above_data_parallel(losses), above_data_parallel(losses, ranks=MORE_RANKS)
    runs = [run for f in shown.files for run in (f.head, *f.head.get("kept", []))]
    dates = sorted(run["date"] for run in runs)
    machines = sorted({f"{run['cores']} cores of {run['processor']}" for run in runs})
    (jax,) = {run["jax"] for run in runs}
    every, rate = losses.rows[0]["every"], named(charts.RATE)
    files = (*shown.files, losses)
    links = [
        f"[{what}]({root}benchmarks/results/{file.name})"
        for what, file in zip(WHAT, files, strict=True)
    ]
    caption = f"""Steps a second, over those of dense gradients in the same run (the line at
1). A host is a process with its own link, of {rate} where no rate is named. All hosts
share one machine ({" or ".join(machines)}), so their work adds up. The first three rows
have the losses of dense gradients; PyTorch's `SparseAdam` is another optimizer. Local steps
change the training: in rounds of {every} steps the held-out loss after the same number of
tokens was {min(worse):.1%} to {max(worse):.1%} higher on {COMPARED["ranks"]} ranks, and
{min(more):.1%} to {max(more):.1%} on {MORE_RANKS}, {len(worse)} seeds each. JAX
{jax}, {dates[0]} to {dates[-1]}; results and commands: {", ".join(links)}."""
    picture = f"![{shown.says}]({docs}pictures/charts/{shown.name}.svg)"
    return f"{picture}\n\n*{' '.join(caption.split())}*"


def written(page):
    """The text of one of `PAGES`, with the chart that results make."""
    made = chart(*PAGES[page])
    return GAINS.sub(lambda found: f"{found[1]}{made}\n{found[2]}", page.read_text())
