"""From the hosts that were measured to 1,024: the cost model, fitted and held out.

    python -m benchmarks.scale benchmarks/results/communication-jax0.10.2.jsonl

Takes the times that `benchmarks.communication` measured on one Zipf workload at one rate,
and fits, by least squares of relative errors, over all schemes together

    time = rounds * alpha + bytes / bandwidth + share * hosts * cpu / cores

with rounds and bytes from the papers' formulas (`sparsejax.cost_model`) and cpu, the
processor time of a rank, as it was measured: all hosts share this machine's cores, on a
cluster each has its own. The largest number of hosts is left out of the fit, and the error
there is printed. The extension to more hosts gives every host its own cores (share * cpu),
with cpu on a line in the bytes, fitted to the hosts measured.
"""

import argparse
import csv
import json
import pathlib
import statistics
import sys

import matplotlib
import numpy as np


matplotlib.use("Agg")

import matplotlib.pyplot as plt

from benchmarks import workloads
from benchmarks.record import RESULTS, say
from benchmarks.testbed import network
from sparsejax import cost_model


# Which formula stands for which side.
FORMULAS = {
    "psum": cost_model.SCHEMES["all_reduce"],
    "zen": cost_model.SCHEMES["balanced_parallelism"],
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
    fit = _fit([row for row in known if row["hosts"] < most], head["cores"])
    alpha, per_byte, share = fit
    line = network.bits_per_second(options.rate) / 8
    say(
        f"fitted below {most} hosts: alpha {1e3 * alpha:.2f} ms, bandwidth "
        f"{1 / per_byte / 1e6:.1f} MB/s (the link's is {line / 1e6:.1f}), share {share:.2f}"
    )
    say(f"\nheld out, {most} hosts  measured ms  model ms   error")
    for row in (row for row in known if row["hosts"] == most):
        measured, model = _time(row), float(_features(row, head["cores"]) @ fit)
        say(
            f"  {row['scheme']:20} {1e3 * measured:10.0f} {1e3 * model:9.0f}"
            f" {model / measured - 1:8.0%}"
        )
    _extend(known, fit, options, head)
    return 0


def _time(row):
    return statistics.median(row["seconds"])


def _cost(scheme, hosts, found):
    return FORMULAS[scheme](workload(hosts, found))


def _features(row: dict, cores: int) -> np.ndarray:
    cost = _cost(row["scheme"], row["hosts"], row)
    return np.array([cost.rounds, cost.bytes, row["hosts"] * row["cpu"] / cores])


def _fit(rows: list[dict], cores: int) -> np.ndarray:
    """Alpha, seconds a byte, and the share of the work that is waited for; none below 0."""
    times = np.array([_time(row) for row in rows])
    features = np.array([_features(row, cores) for row in rows]) / times[:, None]
    kept = [0, 1, 2]
    while True:
        found = np.zeros(3)
        found[kept], *_ = np.linalg.lstsq(features[:, kept], np.ones(len(rows)), rcond=None)
        if (found >= 0).all():
            return found
        kept.remove(int(found.argmin()))


def _extend(known: list[dict], fit: np.ndarray, options, head: dict) -> None:
    """Prints and draws what the model says of more hosts, each with its own cores."""
    hosts = [1 << k for k in range(1, MOST.bit_length())]
    table = {}
    for scheme in FORMULAS:
        own = [row for row in known if row["scheme"] == scheme]
        if not own:
            continue
        sent = [_cost(scheme, row["hosts"], row).bytes for row in own]
        slope, start = np.polyfit(sent, [row["cpu"] for row in own], 1)
        table[scheme] = []
        for n in hosts:
            cost = _cost(scheme, n, own[0])
            cpu = max(0.0, start + slope * cost.bytes)
            table[scheme].append(float(np.array([cost.rounds, cost.bytes, cpu]) @ fit))
    say("\nseconds on hosts with cores of their own, by the model")
    say(f"{'hosts':>8} " + " ".join(f"{name:>13}" for name in table))
    for i, n in enumerate(hosts):
        say(f"{n:8} " + " ".join(f"{times[i]:13.3f}" for times in table.values()))
    stem = RESULTS / f"scale-{options.workload}-{options.rate}-jax{head['jax']}"
    with stem.with_suffix(".csv").open("w", newline="") as lines:
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
    figure.savefig(stem.with_suffix(".png"), dpi=120)
    say(f"\nwritten: {stem}.csv and .png")


if __name__ == "__main__":
    sys.exit(main())
