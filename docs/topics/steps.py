"""Whole steps on a limited network."""

from recorded import digits, times

from benchmarks.charts import steps as charts
from benchmarks.charts.chart import mbit, named
from topics.words import between, listed


RATE = named(charts.RATE)


def in_jit():
    chart = charts.in_jit()
    (found,) = chart.files
    rates = sorted({row["rate"] for row in found.rows}, key=mbit)
    ends = [rates[0], rates[-1]]
    at = lambda side, rate, panel: chart.value(side, mbit(rate), panel)
    said = lambda side, panel: between([at(side, rate, panel) for rate in rates])
    of = {"model": "decoder", "rate": charts.RATE}
    loss = {
        side: found.one(**of, scheme=side)["loss"]
        for side in ("jit, sparse", "jit, dense", "shard_map, sparse")
    }
    language = [
        abs(row["loss"] - found.one(**_dense(row))["loss"])
        for row in found.where(model="language")
    ]
    pairs = [
        f"{times(at('jit', rate, 1))} where `shard_map` has "
        f"{times(at('shard_map', rate, 1))} at {named(rate)}"
        for rate in rates
    ]
    hosts = found.rows[0]["hosts"]
    text = f"""With parameters sharded inside a host and replicated across {hosts} hosts,
the two lines of [Inside `jit`](inside_jit.md) make a language model {said("jit", 0)} times
as fast as dense gradients, from {named(ends[1])} to {named(ends[0])}, and tables by rows
{said("jit, tables by rows", 0)} times. Its losses are those of dense gradients to within
{max(language):.1e}.

**Limits.** The decoder was to gain under `jit` what it gains in `shard_map`, and does not:
{listed(pairs)}. And DGC changes the training: after the same steps, at {RATE}, its loss is
{digits(loss["jit, sparse"])} under `jit` and {digits(loss["shard_map, sparse"])} in
`shard_map`, where dense gradients have {digits(loss["jit, dense"])}."""
    conditions = f"""Medians of turns, with the least and the largest. {hosts} hosts of two
devices, one process a host; in `shard_map` parameters are replicated over all devices, and
times are over the dense sum of the same form. Tables are sharded by rows. Of the decoder
`dgc` sends one number in a hundred."""
    return "Under `jit`, with FSDP", text, chart, conditions, ["Steps under `jit`"]


def _dense(row):
    """The dense row that has the same parameters, rate and form."""
    form, _ = row["scheme"].split(", ")
    same = {key: row[key] for key in ("model", "shards", "rate")}
    return same | {"scheme": f"{form}, dense"}


def by_rows():
    chart = charts.rows()
    ours, theirs = (chart.points(side) for side in ("zen_sync, lazy", "PyTorch, sparse"))
    slower = [
        f"{of.at.replace(chr(10), ' ')} ({times(theirs[of.at].value)} against "
        f"{times(of.value)})"
        for of in ours.values()
        if of.value < theirs[of.at].value
    ]
    values = [point.value for point in ours.values()]
    alone = [point.value for point in chart.points("lazy", 1).values()]
    _, in_one = chart.files
    cold = [row["times_as_fast_after"] for row in in_one.where(side="exact")]
    text = f"""A step that sends and updates only the rows that were read is
{between(values)} times as fast as a dense one on a network, and {between(alone)} times as
fast in one process without any: there the dense optimizer, which updates each row, is what
is saved.

**Limits.** PyTorch's sparse embeddings are faster for {listed(slower)}. On a table that is
small for its batch little is saved: the smallest ratio above is of one of a million rows
that are read evenly. Where a step finds none of its rows in the caches, since another side
ran before it, it is {between(cold, 2)} times as fast in one process. An optimizer that is
exact also takes longer than `lazy(..., exact=False)`, which leaves rows alone that a step
does not read."""
    conditions = f"""Left: whole training steps at {RATE}; "rows, gathered" sends all lists
to all hosts, and PyTorch has gloo's sparse all-reduce and `SparseAdam`, which is another
optimizer. Right: a click model with Adam on one process."""
    named_tables = ["Whole steps", "Tables by rows, in one process"]
    return "Tables by rows", text, chart, conditions, named_tables


def examples():
    chart = charts.examples()
    (found,) = chart.files
    hosts = sorted({row["hosts"] for row in found.rows})
    few, many = (chart.points(f"{n} hosts") for n in hosts)
    sent = chart.points(f"{hosts[-1]} hosts", 1)
    mine = {at: p for at, p in many.items() if "PyTorch" not in at}
    dgc = next(at for at in many if "dgc" in at)
    least = min(mine.values(), key=lambda p: p.value)
    ahead = []
    for example in dict.fromkeys(row["example"] for row in found.rows):
        side = f"{example}: PyTorch, sparse"
        if side in few and few[side].value > few[f"{example}: zen_sync, lazy"].value:
            ahead.append(f"`{example}`")
    gains = lambda of: between([p.value for at, p in of.items() if "PyTorch" not in at])
    text = f"""All examples gain on {hosts[0]} hosts, {gains(few)} times, and less on
{hosts[-1]}, {gains(many)} times, where {hosts[-1]} hosts work on two cores.

**Limits.** `{dgc.replace(": ", "` with `", 1).replace(", ", "` and `")}` gains the least on
{hosts[-1]} hosts: it sends {times(sent[dgc].value)} times fewer bytes, and makes
{times(many[dgc].value)} times the steps of dense gradients, since thresholds and messages
of {hosts[-1]} ranks are made on the same two cores. PyTorch's sparse embeddings are faster
than `zen_sync` with `lazy` on {hosts[0]} hosts for {listed(ahead)}."""
    assert least.at == dgc
    conditions = f"""At {RATE}. All sides of an example start from the same parameters and
train on the same batches, in turn; PyTorch's ran after the others. The language model has
larger tables than in `examples/`; all else is as there. Bytes are those at the interface of
a host."""
    return "The examples", text, chart, conditions, ["The examples"]


def to_the_same_loss():
    chart = charts.same_loss()
    (found,) = chart.files
    share = {(row["example"], row["scheme"]): row["share"] for row in found.rows}
    models = dict.fromkeys(example for example, _ in share)
    said = [
        f"for `{model}` in {share[model, 'rows']:.2f} of the time by rows and in "
        f"{share[model, 'embrace']:.2f} by EmbRace"
        for model in models
    ]
    steps = len(found.rows[0]["losses"])
    text = f"""Nothing is left out, so the loss falls by step as with dense gradients, and
by the clock sooner. The loss with which dense gradients end is reached
{", and ".join(said)}.

**Limits.** No other example was run in this way, and {steps} steps are the beginning of a
training."""
    conditions = f"""{found.rows[0]["hosts"]} hosts at {RATE}, training loss of each of
{steps} steps."""
    return "Loss over the clock", text, chart, conditions, ["Time to the same loss"]


def embrace():
    chart = charts.embrace()
    labels = [series.label for series in chart.panels[0].series]
    hybrid = [chart.value(label, "hybrid") for label in labels]
    slower = {
        side: sum(
            chart.value(label, side) < chart.value(label, "hybrid") for label in labels
        )
        for side in ("vertical", "horizontal", "both")
    }
    said = [f"`{side}` in {count}" for side, count in slower.items()]
    text = f"""Tables by columns (`hybrid`) are {between(hybrid, 2)} times as fast as the
best of all-reduce, all-gather and Parallax, and a rank holds its share of the columns
alone.

**Limits.** The two dimensions of the schedule gain nothing certain here: of {len(labels)}
cases `hybrid` alone is faster than {listed(said)}. On CPUs nothing is sent while something
is computed, which is what a schedule needs. No GPU has run it."""
    conditions = f"At {RATE}. The line is the best of the three baselines."
    return "EmbRace", text, chart, conditions, ["EmbRace"]
