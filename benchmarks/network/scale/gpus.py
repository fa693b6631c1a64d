"""A step on many hosts with a GPU each: counted on the device, reckoned on the wire.

What one of sixteen H200s does in a step is in the results of `benchmarks.device`. On more
ranks it launches as much, as programs do not grow (`programs`), but for AGsparse, whose
launches are a loop over the ranks, and for the ordered sums of Zen, which are one, too, on
as many ranks as they are the default for; and it moves more, as more is sent: what it moved
beside reading the gradient and writing the sum grows as the bytes that it sends. Costs of
launches and memory are those stated there. Of a collective's latency two bounds are told:
one message, and all its messages one behind the other.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks.data import workloads
from benchmarks.device.compiled import IN_ANY_ORDER
from benchmarks.device.costs import Costs, beyond
from benchmarks.harness import record as records
from benchmarks.harness.record import say
from benchmarks.harness.results import Results
from benchmarks.network.scale import model, rounds
from benchmarks.network.scale.programs import described
from sparsejax.wire.ordered import MOST_SENDERS


# Loads of `benchmarks.device`: rows, width, the share of a rank's rows. Sets of single
# numbers on 1,024 ranks would not fit here.
LOADS = {"65,536 x 64": (65_536, 64, 0.012), "793,471 x 512": (793_471, 512, 0.0113)}
# Its schemes, and the sides that send the same.
SIDES = {"zen": "zen", "agsparse": "agsparse", "all-reduce": "psum"}


def extended(given: Any) -> Iterator[dict]:
    """Rows of the extension for each load, scheme, number of hosts and rate."""
    path = records.RESULTS / given.device
    rows = Results(path).rows
    rows = [row for row in rows if row["load"] in LOADS and row["kernels"] is None]
    any_order = {row["load"]: row for row in rows if row["scheme"] == IN_ANY_ORDER}
    rows = [row for row in rows if row["scheme"] in SIDES]
    hosts = [1 << k for k in range(4, max(given.hosts).bit_length())]
    for load, (units, width, density) in LOADS.items():
        of_load = [row for row in rows if row["load"] == load]
        dense = next(row for row in of_load if row["scheme"] == "all-reduce")
        sets = workloads.zipf(max(hosts), units, density)
        for row in of_load:
            for ranks in hosts:
                sent = counted(SIDES[row["scheme"]], sets[:ranks], width)
                if ranks == row["ranks"] and row["scheme"] != "all-reduce":
                    _compare(row, model.sent(sent, ranks))
                # What has become an all-reduce does on the device what that does.
                counts = dense if sent[-1].collective == "psum" else row
                if counts["scheme"] == "zen":
                    counts = on_ranks(counts, any_order[load], ranks)
                for gbit in given.gbits:
                    line = _line(given, counts, sent, ranks, gbit)
                    yield line | {"scheme": row["scheme"]}


def counted(side: str, sets: np.ndarray, width: int) -> list[rounds.Round]:
    """The rounds of a side in the message sizes that it has on GPUs."""
    with jax.sharding.use_abstract_mesh(described(len(sets), "cuda")):
        return rounds.of_step(side, sets, width)


def on_ranks(ordered: dict, other: dict, ranks: int) -> dict:
    """What is counted of a step of Zen on so many ranks, as its owners add by default.

    Args:
        ordered: The row of sums that are ordered.
        other: That of sums in any order.
        ranks: How many.
    """
    if ranks > MOST_SENDERS:
        return other
    more = (ordered["launches"] - other["launches"]) * ranks / ordered["ranks"]
    return ordered | {"launches": other["launches"] + more}


def device_seconds(row: dict, sent: float, ranks: int) -> float:
    """Seconds on the device, of a rank that sends so many bytes."""
    cost = Costs(**row["costs"])
    grows = row["scheme"] == "agsparse"
    launches = row["launches"] * (ranks / row["ranks"] if grows else 1)
    least = min(2.0 * row["array"], row["read"] + row["written"])
    more = max(1.0, sent / row["sent"])
    moved = least + (row["read"] + row["written"] - least) * more
    working = cost.moving(moved) + beyond(row["seconds"]) * more
    return cost.launch * launches + cost.wait * row["waits"] + working


def _compare(row, sent):
    if abs(sent / row["sent"] - 1) > 0.01:
        say(
            f"{row['load']}, {row['scheme']}: {row['sent']:,.0f} bytes counted on "
            f"{row['ranks']} devices, {sent:,.0f} here"
        )


def _line(given, row, found, ranks, gbit):
    sent = model.sent(found, ranks)
    link = 8 * sent / (1e9 * gbit)
    told = device_seconds(row, sent, ranks) + link
    alpha = 1e-6 * given.latency
    low = told + alpha * len(found)
    waits = {"pmax": 2 * math.ceil(math.log2(ranks)), "psum": 2 * (ranks - 1)}
    of = lambda one: waits.get(one.collective, ranks - 1)
    high = told + alpha * sum(map(of, found))
    return {
        "work": "H200, counted",
        "workload": row["load"],
        "scheme": row["scheme"],
        "hosts": ranks,
        "gbit_per_s": gbit,
        "bytes": sent,
        "collectives": len(found),
        "link_s": link,
        # Between the two bounds, by the mean of their logarithms.
        "seconds": math.sqrt(low * high),
        "low_s": low,
        "high_s": high,
    }
