"""From the hosts that were measured to 1,024: the cost model, fitted and held out.

    python -m benchmarks.communication --workloads lstm --more-rates --name scale-hosts
        --schemes psum,balanced,hierarchical,agsparse
    python -m benchmarks.scale benchmarks/results/scale-hosts-jax0.10.2.jsonl

Takes the times that the first measured on one Zipf workload at one rate (Balanced
Parallelism by its own name, since Zen is another scheme between few hosts), and fits, by
least squares of relative errors, over all schemes together

    time = bytes / bandwidth + alpha * rounds + share * hosts * cpu / cores

with rounds and bytes from the papers' formulas (`sparsejax.cost_model`) and cpu, the
processor time of a rank, as it was measured, or beyond that on a line in the bytes: all
hosts share this machine's cores, on a cluster each has its own. The bandwidth is the same
for all schemes. Alpha and share are each scheme's own: messages of a ring and of an
all-to-all cost unlike, and how much of the work is waited for depends on what goes on
beside it. The largest number of hosts is left out of all that is fitted, and the error
there is printed. The extension to more hosts gives every host its own cores (share * cpu).
"""

import argparse
import csv
import json
import pathlib
import statistics
import sys
from typing import NamedTuple

import matplotlib
import numpy as np


matplotlib.use("Agg")

import matplotlib.pyplot as plt

from benchmarks import workloads
from benchmarks.record import RESULTS, say
from benchmarks.testbed import network
from sparsejax.advise.papers import cost_model


# Which formula stands for which side.
FORMULAS = {
    "psum": cost_model.SCHEMES["all_reduce"],
    "balanced": cost_model.SCHEMES["balanced_parallelism"],
    "hierarchical": cost_model.SCHEMES["hierarchical_centralization"],
    "agsparse": cost_model.SCHEMES["ag_sparse"],
}
MOST = 1024


def workload(hosts: int, found: dict) -> cost_model.Workload:
    """The Zipf workload of a row on so many hosts, its growth from the law itself."""
    units, width = (*found["shape"], 1)[:2]
    chances = workloads.zipf_chances(units, found["density"])
    points = [min(2 << k, hosts) for k in range(cost_model.doublings(hosts))]
    growth = tuple((1 - (1 - chances) ** k).mean() / chances.mean() for k in points)
    return cost_model.Workload(hosts, units, 4 * width, float(chances.mean()), growth)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale")
    parser.add_argument("results", type=pathlib.Path, help="of benchmarks.communication")
    parser.add_argument("--workload", default="lstm", help="a Zipf one (%(default)s)")
    parser.add_argument("--rate", default="250mbit")
    options = parser.parse_args(argv)
    head, *rows = map(json.loads, options.results.read_text().splitlines())
    known = [
        row
        for row in rows
        if row["scheme"] in FORMULAS
        and (row["workload"], row["rate"]) == (options.workload, options.rate)
    ]
    if len({row["hosts"] for row in known}) < 3:
        parser.error(f"{options.results} lacks {options.workload} at {options.rate}.")
    say(f"{options.results.name}: {head['date']}, jax {head['jax']}, {head['processor']}")
    most = max(row["hosts"] for row in known)
    fitted = [row for row in known if row["hosts"] < most]
    fit, work = _fit(fitted, head["cores"]), _work(fitted)
    line = network.bits_per_second(options.rate) / 8
    say(
        f"fitted below {most} hosts: bandwidth {1 / fit.per_byte / 1e6:.1f} MB/s "
        f"(the link's is {line / 1e6:.1f})"
    )
    for scheme, (alpha, share) in fit.own.items():
        say(f"  {scheme:20} alpha {1e3 * alpha:6.2f} ms, share of the work {share:.2f}")
    say(f"\nheld out, {most} hosts  measured ms  model ms   error")
    for row in (row for row in known if row["hosts"] == most):
        shared = row["hosts"] * work[row["scheme"]](_costs(row)) / head["cores"]
        measured, model = _time(row), fit.time(row["scheme"], _costs(row), shared)
        say(
            f"  {row['scheme']:20} {1e3 * measured:10.0f} {1e3 * model:9.0f}"
            f" {model / measured - 1:8.0%}"
        )
    _extend(known, fit, options, head)
    return 0


def _time(row):
    return statistics.median(row["seconds"])


def _costs(row):
    return _cost(row["scheme"], row["hosts"], row)


def _cost(scheme, hosts, found):
    return FORMULAS[scheme](workload(hosts, found))


class Fit(NamedTuple):
    """What was fitted.

    Attributes:
        per_byte: Seconds a byte, for all schemes.
        own: Each scheme's alpha, and the share of its work that is waited for.
    """

    per_byte: float
    own: dict[str, tuple[float, float]]

    def time(self, scheme: str, cost: cost_model.Cost, work: float) -> float:
        """Seconds, where the work before which nothing goes on takes so many."""
        alpha, share = self.own[scheme]
        return self.per_byte * cost.bytes + alpha * cost.rounds + share * work


def _fit(rows: list[dict], cores: int) -> Fit:
    """Least squares of relative errors; nothing below 0."""
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    features = np.zeros((len(rows), 1 + 2 * len(schemes)))
    for features_of, row in zip(features, rows, strict=True):
        cost, place = _costs(row), 1 + 2 * schemes.index(row["scheme"])
        work = row["hosts"] * row["cpu"] / cores
        features_of[[0, place, place + 1]] = cost.bytes, cost.rounds, work
        features_of /= _time(row)
    kept = list(range(features.shape[1]))
    while True:
        found = np.zeros(features.shape[1])
        found[kept], *_ = np.linalg.lstsq(features[:, kept], np.ones(len(rows)), rcond=None)
        if (found >= 0).all():
            own = zip(schemes, found[1:].reshape(-1, 2).tolist(), strict=True)
            return Fit(float(found[0]), {scheme: tuple(two) for scheme, two in own})
        kept.remove(int(found.argmin()))


def _work(rows: list[dict]) -> dict:
    """For each scheme, from a cost to the processor time of a rank: a line in the bytes."""
    found = {}
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        own = [row for row in rows if row["scheme"] == scheme]
        sent, cpu = [_costs(row).bytes for row in own], [row["cpu"] for row in own]
        line = np.polynomial.Polynomial.fit(sent, cpu, 1)
        found[scheme] = lambda cost, line=line: max(0.0, float(line(cost.bytes)))
    return found


def _extend(known: list[dict], fit: Fit, options, head: dict) -> None:
    """Prints and draws what the model says of more hosts, each with its own cores."""
    hosts = [1 << k for k in range(1, MOST.bit_length())]
    table = {}
    for scheme in FORMULAS:
        own = [row for row in known if row["scheme"] == scheme]
        if not own:
            continue
        work, costs = _work(own)[scheme], [_cost(scheme, n, own[0]) for n in hosts]
        table[scheme] = [fit.time(scheme, cost, work(cost)) for cost in costs]
    say("\nseconds on hosts with cores of their own, by the model")
    say(f"{'hosts':>8} " + " ".join(f"{name:>13}" for name in table))
    for i, n in enumerate(hosts):
        say(f"{n:8} " + " ".join(f"{times[i]:13.3f}" for times in table.values()))
    table_file = RESULTS / f"scale-{options.workload}-{options.rate}-jax{head['jax']}.csv"
    with table_file.open("w", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["hosts", *table])
        writer.writerows([n, *(t[i] for t in table.values())] for i, n in enumerate(hosts))
    figure, axes = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
    for name, times in table.items():
        (drawn,) = axes.loglog(hosts, times, label=name, base=2)
        own = [row for row in known if row["scheme"] == name]
        points = [row["hosts"] for row in own], [_time(row) for row in own]
        axes.plot(*points, "o", color=drawn.get_color(), markersize=4)
    axes.set(xlabel="hosts", ylabel="seconds")
    axes.set_title(
        f"{options.workload} at {options.rate}: model with cores of their own (lines),\n"
        f"measured on {head['cores']} shared cores (points)",
        fontsize=10,
    )
    axes.legend(fontsize=8)
    figure.savefig(table_file.with_suffix(".png"), dpi=120)
    say(f"\nwritten: {table_file} and .png")


if __name__ == "__main__":
    sys.exit(main())
