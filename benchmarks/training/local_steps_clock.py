"""Loss over the clock of local steps, from losses and from the seconds of a step.

`benchmarks.training.local_steps` measures the loss after each step on simulated ranks,
`benchmarks.network.local_steps` how long a step takes on as many hosts whose links have a
given rate. A panel has a number of hosts and a rate, and a line for each side that both
have run: the mean loss of all seeds, over steps times seconds of a step.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from benchmarks.harness import figure, results
from benchmarks.harness.record import path_of
from benchmarks.testbed.network import bits_per_second


NAME = "local-steps-clock"
# The side of the network's benchmark that sends the same bytes at the same steps.
TIMED = {
    "data_parallel": "data_parallel",
    "dgc": "dgc",
    "average": "diloco",
    "diloco": "diloco",
    "streaming": "streaming",
    "sparse_loco": "sparse_loco",
    "bins": "sparse_loco",
    "ranks": "sparse_loco",
    "demo": "demo",
}


def lines(trained: list[dict], paced: list[dict]) -> Iterator[dict]:
    """A line for each side, number of hosts, rate and evaluation.

    Args:
        trained: Rows of `benchmarks.training.local_steps`.
        paced: Rows of `benchmarks.network.local_steps`.
    """
    runs: dict[tuple, list[dict]] = {}
    for row in trained:
        if not row["tuning"]:
            key = tuple(row[name] for name in ("side", "ranks", "every", "steps"))
            runs.setdefault(key, []).append(row)
    for (side, hosts, every, steps), own in runs.items():
        losses = np.mean([row["losses"] for row in own], axis=0)
        evaluated = list(zip(own[0]["tokens"], losses, strict=True))
        tokens_a_step = own[0]["tokens"][-1] / steps
        for row in paced:
            is_timed = row["scheme"] == TIMED.get(side)
            if not is_timed or (row["hosts"], row["every"]) != (hosts, every):
                continue
            pace = results.a_step(row) / tokens_a_step
            for tokens, loss in evaluated:
                yield {
                    "side": side,
                    "hosts": hosts,
                    "rate": row["rate"],
                    "every": every,
                    "seeds": len(own),
                    "tokens": tokens,
                    "seconds": tokens * pace,
                    "loss": float(loss),
                }


def save(trained: list[dict]) -> None:
    """Writes the lines, and draws a panel for each number of hosts and rate."""
    path = path_of("local-steps-network", ".jsonl")
    paced = results.read(path.stem).rows if path.exists() else []
    found = list(lines(trained, paced))
    if not found:
        return
    hosts = sorted({line["hosts"] for line in found})
    rates = sorted({line["rate"] for line in found}, key=bits_per_second)
    made, axes = figure.panels(len(hosts), len(rates), size=(4, 3), sharey=True)
    for axis, (count, rate) in zip(axes.flat, itertools.product(hosts, rates), strict=True):
        for side in TIMED:
            at = {"side": side, "hosts": count, "rate": rate}
            if own := [line for line in found if at.items() <= line.items()]:
                seconds, losses = ([x[key] for x in own] for key in ("seconds", "loss"))
                axis.plot(seconds, losses, label=side)
        axis.set(title=f"{count} hosts, {rate}", xscale="log")
    for axis in axes[-1]:
        axis.set(xlabel="seconds")
    for axis in axes[:, 0]:
        axis.set(ylabel="held-out loss")
    axes[0, 0].legend(fontsize="small")
    figure.save(NAME, found, made)
