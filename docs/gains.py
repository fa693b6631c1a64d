"""README's table of gains, from benchmarks/results: what a visitor asks first."""

import re

from recorded import Results, seconds, table, times


GAINS = re.compile(r"(<!-- gains: .*? -->\n).*?(<!-- end of gains -->)", re.S)


def _in_tables(results, example):
    """The share of an example's numbers that are in its tables."""
    row = results.one(example=example, hosts=16, scheme="dense")
    held = sum(rows * width for rows, width in row["tables"])
    return f"{held / row['numbers']:.0%}"


def gains():
    """The table."""
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
    rows = [[*row[:3], f"[file](benchmarks/results/{row[3]})"] for row in rows]
    return table(["what", "against", "times as fast", "from"], rows, 4)


def readme(text):
    """README's text with the table that results make."""
    return GAINS.sub(lambda found: found[1] + gains() + "\n" + found[2], text)
