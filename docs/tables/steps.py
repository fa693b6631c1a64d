"""Tables of whole steps on a network and of local steps, for performance_tables.md.

Each section is a function that returns a title, what it says, a table, and its file.
"""

import statistics

from recorded import Results, a_step, digits, seconds, table, times

from benchmarks.charts.chart import named
from benchmarks.charts.selecting import LOCAL


SIDES = {
    "zen": "`zen_sync`",
    "rows": "`zen_sync`, `lazy`",
    "rows, capacity": "the same, `capacity=90_000`",
    "exact": "`lazy`",
    "touched": "`lazy`, `exact=False`",
    "vertical": "hybrid, vertical",
    "horizontal": "hybrid, horizontal",
    "both": "hybrid, both",
    "embrace": "EmbRace's hybrid, `column_lookup`",
    "ok_topk": "`ok_topk_sync`",
    "spardl": "`spardl_sync`",
    "dragonn": "`dragonn`, `zen_sync`",
    "dgc": "`dgc`, `zen_sync`",
}


PACE = ("hosts", "side", "steps/s", "times dense", "MB sent")


def pace(results, row, of):
    """The cells `PACE` of a row, beside the dense row that has the same values `of`."""
    dense = results.where(scheme="dense", **of)
    gain = times(seconds(dense[0]) / seconds(row)) if dense else ""
    side = SIDES.get(row["scheme"], row["scheme"])
    rate, sent = digits(1 / seconds(row), 2), digits(row["sent"] / 1e6, 2)
    return [row["hosts"], side, rate, gain, sent]


def in_jit():
    results = Results("in-jit-network-jax0.10.2")
    rows = []
    for row in results.rows:
        form, side = row["scheme"].split(", ")
        of = {key: row[key] for key in ("model", "shards", "rate")}
        dense = results.one(**of, scheme=f"{form}, dense")
        low, high = min(row["times_dense"]), max(row["times_dense"])
        gain = statistics.median(row["times_dense"])
        rows.append(
            [
                *(row["model"], row["shards"], named(row["rate"]), f"`{form}`, {side}"),
                f"{1e3 * seconds(row):,.0f}",
                f"{gain:.1f} ({low:.1f} to {high:.1f})",
                digits(row["sent"] / 1e6, 2),
                f"{row['loss'] - dense['loss']:+.2g}",
            ]
        )
    hosts = results.rows[0]["hosts"]
    text = f"""Milliseconds a step on {hosts} hosts of two devices, one process a host.
Under `jit` parameters are sharded inside a host, over rows or columns, and replicated
across hosts. In `shard_map` they are replicated over all devices. The language model is
summed by `zen_sync`, the decoder by `dgc` at one in a hundred and `zen_sync`; *rows* adds
`lazy`, whose tables are striped. Times dense are those of the same form, in brackets from
the lowest to the highest turn. The last column is the loss after the same steps, minus that
of dense gradients. By columns, and by rows, are two runs."""
    head = ["model", "shards", "rate", "side", "ms", "times dense", "MB sent", "loss"]
    return "Steps under `jit`", text, table(head, rows, 4), results


def end_to_end():
    results = Results("end-to-end-jax0.10.2")
    rows = []
    for task, about, hosts in dict.fromkeys(
        (row["task"], row["about"], row["hosts"]) for row in results.rows
    ):
        of = {"task": task, "about": about, "hosts": hosts}
        for row in results.where(**of):
            rows.append([f"{task}, {about}", *pace(results, row, of)])
    text = """Steps a second of whole training steps at 250 Mbit/s, how many times those
of dense gradients, and the MB that a host sends. `gathered` sends all lists to all
hosts, as Horovod does; PyTorch has sparse embeddings, gloo's sparse all-reduce and
SparseAdam."""
    return "Whole steps", text, table(["model", *PACE], rows, 3), results


def in_one_process():
    results = Results("rows-jax0.10.2")
    rows = []
    for row in results.rows:
        side = SIDES.get(row["side"], row["side"])
        fast = times(row["times_as_fast"])
        mib = f"{row['temporaries'] / 2**20:,.0f}"
        name = f"{row['rows']:,}, {row['ids']}"
        rows.append([name, side, digits(row["milliseconds"], 2), fast, mib])
    text = """A step of a click model with Adam in one process, without any network:
what updating only the rows that were read saves by itself. `exact=False` is the lazy
Adam that leaves unread rows alone."""
    head = ["rows of the table, ids", "side", "ms", "times dense", "temporaries, MiB"]
    return "Tables by rows, in one process", text, table(head, rows, 2), results


def workloads():
    results = Results("workloads-network-jax0.10.2")
    rows = []
    for row in results.rows:
        of = {"example": row["example"], "hosts": row["hosts"]}
        rows.append([f"`{row['example']}`", *pace(results, row, of)])
    text = """Steps a second of the examples at 250 Mbit/s, how many times those of dense
gradients, and the MB that a host sends in a step. All sides start from the same
parameters and train on the same batches. The language model has two tables of 40,000 x 128
here; all else is as `examples/` has it. PyTorch trains by DistributedDataParallel over
gloo; its sparse side has sparse embeddings and SparseAdam, which is another optimizer: it
leaves rows alone that a step does not read. The hosts share two cores, so the more there
are, the less these ratios are."""
    return "The examples", text, table(["example", *PACE], rows, 3), results


def to_the_same_loss():
    results = Results("workloads-curves-jax0.10.2")
    rows = []
    for row in results.rows:
        side = SIDES.get(row["scheme"], row["scheme"])
        share = f"{row['share']:.2f}"
        rows.append([f"`{row['example']}`", row["hosts"], side, share])
    text = """The time in which each side reaches the loss with which dense gradients end,
as a share of the time that these take, at 250 Mbit/s."""
    head = ["example", "hosts", "side", "share of the time"]
    return "Time to the same loss", text, table(head, rows, 3), results


def embrace():
    results = Results("embrace-network-jax0.10.2")
    rows = []
    for task in ("language", "translation"):
        for hosts in (4, 16):
            for row in results.where(task=task, hosts=hosts):
                if "gain" not in row or row.get("stall") is None:
                    continue
                cells = [
                    f"{1 / seconds(row):.2f}",
                    times(row["gain"]) if row["gain"] >= 9.95 else f"{row['gain']:.2f}",
                    f"{1e3 * row['stall']:,.0f}",
                    f"{row['sent'] / 1e6:.2f}",
                    f"{row['table_bytes'] / 1e6:.2f}",
                ]
                side = SIDES.get(row["scheme"], row["scheme"])
                rows.append([task, hosts, side, *cells])
    text = """Steps a second at 250 Mbit/s, how many times those of the best of
all-reduce, all-gather and Parallax, the computation stall, the MB that a host sends,
and the MB of tables that a rank holds. *hybrid* is `column_lookup`; *vertical* and
*horizontal* are the two dimensions of the schedule, which gain nothing on CPUs: there
nothing is sent while something is computed."""
    head = ["model", "hosts", "system", "steps/s", "times best", "stall, ms", "MB sent"]
    return "EmbRace", text, table([*head, "tables, MB"], rows, 3), results


def local_steps():
    results = Results("local-steps-network-jax0.10.2")
    rows = []
    for row in results.rows:
        shares = row["of_alone"]
        rows.append(
            [
                *(row["hosts"], named(row["rate"]), row["every"], LOCAL[row["scheme"]]),
                f"{1e3 * a_step(row):,.0f}",
                f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})",
                f"{row['sent'] / row['steps'] / 1e3:,.1f}",
            ]
        )
    (delay,) = {row["delay"] for row in results.where(scheme="delayed")}
    text = f"""A decoder in rounds of some steps: milliseconds a step, its pace as a
share of steps without an exchange (in brackets from the lowest to the highest turn), and
the KB that a host sends in a step. What is delayed is applied {delay} steps later. All
hosts share two cores."""
    head = ["hosts", "rate", "a round", "side", "ms a step", "of no exchange", "KB a step"]
    return "Local steps on a limited network", text, table(head, rows, 4), results


def local_losses():
    results = Results("local-steps-jax0.10.2")
    rows = []
    for row in results.rows:
        of = {key: row[key] for key in ("ranks", "every", "steps", "seed")}
        own = results.where(side="data_parallel", **of)
        rows.append(
            [
                *(LOCAL[row["side"]], row["ranks"], row["steps"], row["seed"]),
                row["rate"] or "",
                f"{row['loss']:.3f}",
                f"{row['loss'] / own[0]['loss']:.3f}" if own else "",
                digits(row["bytes"] / 1e6),
            ]
        )
    row = results.rows[0]
    text = f"""Held-out loss of the decoder on simulated ranks, in rounds of {row["every"]}
steps, the share of that of data parallelism on the same seed, and the MB that a rank sends.
Outer rates were chosen on seed {row["seed"]}."""
    head = ["side", "ranks", "steps", "seed", "outer rate", "loss", "of data parallel"]
    head += ["MB sent"]
    return "The loss of local steps", text, table(head, rows), results
