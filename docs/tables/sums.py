"""Tables of one sum, for performance_tables.md.

Each section is a function that returns a title, what it says, a table, and its file.
"""

import math

from recorded import Results, digits, seconds, table, times


SETS = {
    "lstm": "rows, drawn by a Zipf law",
    "deepfm": "rows, drawn by a Zipf law",
    "nmt": "rows, drawn by a Zipf law",
    "topk": "single numbers",
    "language": "rows, of a language model",
    "translation": "rows, of a translator",
    "clicks": "rows, of a click model",
}


def on_a_network():
    results = Results("communication-jax0.10.2")
    hosts = (2, 4, 8, 16)
    rows = []
    for name, meaning in SETS.items():
        gains, zen = [], {}
        for n in hosts:
            of = {"workload": name, "hosts": n, "rate": "250mbit"}
            dense, zen = (results.one(**of, scheme=side) for side in ("psum", "zen"))
            gains.append(times(seconds(dense) / seconds(zen)))
        shares = [f"{zen[key]:.1%}" for key in ("density", "after")]  # on the most hosts
        rows.append([f"`{name}`", meaning, *shares, *gains])
    text = """How many times as fast as `lax.psum` Zen adds up 16 MB (8 MB for recorded
sets), one process a host, each with a link of 250 Mbit/s, all of them on two shared
cores. Every sum was checked against that of float64. The last three sets were recorded
from training; densities are those of one of 16 hosts, and of their sum."""
    head = ["set", "what it is", "density", "of the sum", *(f"{n} hosts" for n in hosts)]
    return "Sums on a limited network", text, table(head, rows, 2), results


def by_scheme():
    results = Results("communication-jax0.10.2")
    sets = [name for name in SETS if name != "nmt"]
    of = {"hosts": 16, "rate": "250mbit"}
    rows = []
    for side in [r["scheme"] for r in results.where(workload="lstm", **of)]:
        cells = []
        for name in sets:
            found = results.where(workload=name, scheme=side, **of)
            cells.append(f"{1e3 * seconds(found[0]):,.0f}" if found else "")
        rows.append([side, *cells])
    text = """Milliseconds of one sum over 16 hosts by every scheme, and by PyTorch's
gloo. Less is better. On 16 hosts that share two cores the work of the hosts adds up, so
these ratios are less than hosts with cores of their own would have."""
    head = ["scheme", *(f"`{name}`" for name in sets)]
    return "By scheme", text, table(head, rows), results


def by_density():
    results = Results("densities-jax0.10.2")
    loads = list(dict.fromkeys(row["workload"] for row in results.rows))
    rows = []
    for hosts in (2, 4, 16):
        for side in dict.fromkeys(row["scheme"] for row in results.rows):
            of = [results.one(hosts=hosts, scheme=side, workload=x) for x in loads]
            cells = [f"{1e3 * seconds(row):,.0f}" for row in of]
            rows.append([hosts, side, *cells])
    numbers = math.prod(results.rows[0]["shape"])
    text = f"""Milliseconds of one sum of {numbers:,} numbers, in rows that all ranks draw
from one law, by the share of rows that a rank has, at 250 Mbit/s."""
    head = ["hosts", "side", *(load.removeprefix("rows-") for load in loads)]
    return "By density", text, table(head, rows, 2), results


def bytes_sent():
    results = Results("core-jax0.10.2")
    rows = []
    for density in (0.001, 0.01, 0.03, 0.1, 0.3):
        row = results.one(part="bytes", kind="independent", density=density)
        mb = [
            digits(row[key] / 1e6)
            for key in ("payload", "wire", "coo", "hash_bitmap", "dense")
        ]
        least = digits((row["values"] + row["entropy"]) / 1e6)
        rows.append([f"{density:.1%}", f"{row['after']:.1%}", least, *mb])
    text = """MB that one of eight ranks sends to add up 4M floats, push and pull
together. The first column of bytes is the values and the entropy of the sets, which no
lossless code falls below; *wire* is what was sent, padding included; COO and the hash
bitmap are the papers' formats for the same sets, without padding."""
    head = ["density", "of the sum", "least", "payload", "wire", "COO", "hash bitmap"]
    return "Bytes", text, table([*head, "all-reduce"], rows), results


def dense_costs():
    results = Results("overhead-jax0.10.2")
    rows = []
    for hosts in (1, 2, 16):
        cells = []
        for load in ("dense", "tiny"):
            for side in ("psum", "zen"):
                row = results.one(workload=load, hosts=hosts, scheme=side)
                cells.append(digits(1e3 * seconds(row), 3))
        rows.append([hosts, *cells])
    text = """Milliseconds where sparsity does not help: 16 MB without a zero (`dense`),
and 4,096 numbers (`tiny`), at 250 Mbit/s. By default leaves as small as the second are
not looked at."""
    head = ["hosts", "dense: psum", "zen", "tiny: psum", "zen"]
    return "Where sparsity does not help", text, table(head, rows), results
