"""The cost model fitted to measured hosts, checked on others, and extended to 1,024.

    python -m benchmarks.network.communication --workloads lstm --more-rates
        --name scale-hosts --schemes psum balanced hierarchical agsparse
    python -m benchmarks.network.scale benchmarks/results/scale-hosts-jax0.10.2.jsonl

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

import dataclasses
import json
import pathlib
import statistics
import sys
from typing import NamedTuple

import numpy as np

from benchmarks.data import workloads
from benchmarks.harness import figure, settings, table
from benchmarks.harness.record import say
from benchmarks.harness.settings import option
from benchmarks.harness.table import Column
from benchmarks.testbed import network
from sparsejax.advise.papers import cost_model


# The formula of each side.
FORMULAS = {
    "psum": cost_model.SCHEMES["all_reduce"],
    "balanced": cost_model.SCHEMES["balanced_parallelism"],
    "hierarchical": cost_model.SCHEMES["hierarchical_centralization"],
    "agsparse": cost_model.SCHEMES["ag_sparse"],
}
MOST = 1024


def workload(hosts: int, row: dict) -> cost_model.Workload:
    """The Zipf workload of a row on so many hosts, its growth from the law itself."""
    units, width = (*row["shape"], 1)[:2]
    chances = workloads.zipf_chances(units, row["density"])
    points = [min(2 << k, hosts) for k in range(cost_model.doublings(hosts))]
    growth = tuple((1 - (1 - chances) ** k).mean() / chances.mean() for k in points)
    return cost_model.Workload(hosts, units, 4 * width, float(chances.mean()), growth)


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Fits the cost model to results of `benchmarks.network.communication`."""

    PROGRAM = "benchmarks.network.scale"
    results: str = option(help="a file of rows", positional=True)
    workload: str = option("lstm", "a Zipf workload")
    rate: str = option("250mbit", "of each link, each way")


def main(argv: list[str] | None = None) -> int:
    settings = Settings.parse(argv)
    path = pathlib.Path(settings.results)
    head, *rows = map(json.loads, path.read_text().splitlines())
    rows = [
        row
        for row in rows
        if row["scheme"] in FORMULAS
        and (row["workload"], row["rate"]) == (settings.workload, settings.rate)
    ]
    if len({row["hosts"] for row in rows}) < 3:
        say(f"{settings.results} lacks {settings.workload} at {settings.rate}.")
        return 2
    say(f"{path.name}: {head['date']}, jax {head['jax']}, {head['processor']}")
    most = max(row["hosts"] for row in rows)
    fitted = [row for row in rows if row["hosts"] < most]
    fit, work = _fit(fitted, head["cores"]), _work(fitted)
    line = network.bits_per_second(settings.rate) / 8
    say(
        f"fitted below {most} hosts: bandwidth {1 / fit.per_byte / 1e6:.1f} MB/s "
        f"(the link's is {line / 1e6:.1f})"
    )
    for scheme, (alpha, share) in fit.by_scheme.items():
        say(f"  {scheme:20} alpha {1e3 * alpha:6.2f} ms, share of the work {share:.2f}")
    held_out = [row for row in rows if row["hosts"] == most]

    def model(row):
        shared = most * work[row["scheme"]](_costs(row)) / head["cores"]
        return fit.time(row["scheme"], _costs(row), shared)

    columns = [
        Column("", "scheme"),
        Column("measured ms", _time, ".0f", 1e3),
        Column("model ms", model, ".0f", 1e3),
        Column("error", lambda row: model(row) / _time(row) - 1, ".0%"),
    ]
    table.show(held_out, columns, f"held out, {most} hosts")
    _extend(rows, fit, settings, head)
    return 0


def _time(row):
    return statistics.median(row["seconds"])


def _costs(row):
    return _cost(row["scheme"], row["hosts"], row)


def _cost(scheme, hosts, row):
    return FORMULAS[scheme](workload(hosts, row))


class Fit(NamedTuple):
    """The fitted parameters.

    Attributes:
        per_byte: Seconds a byte, for all schemes.
        by_scheme: Each scheme's alpha, and the share of its work that is waited for.
    """

    per_byte: float
    by_scheme: dict[str, tuple[float, float]]

    def time(self, scheme: str, cost: cost_model.Cost, work: float) -> float:
        """Seconds, where the work before which nothing goes on takes so many."""
        alpha, share = self.by_scheme[scheme]
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
        solution = np.zeros(features.shape[1])
        solution[kept], *_ = np.linalg.lstsq(
            features[:, kept], np.ones(len(rows)), rcond=None
        )
        if (solution >= 0).all():
            pairs = zip(schemes, solution[1:].reshape(-1, 2).tolist(), strict=True)
            return Fit(float(solution[0]), {scheme: tuple(two) for scheme, two in pairs})
        kept.remove(int(solution.argmin()))


def _work(rows: list[dict]) -> dict:
    """For each scheme, from a cost to the processor time of a rank: a line in the bytes."""
    work = {}
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        points = [
            (_costs(row).bytes, row["cpu"]) for row in rows if row["scheme"] == scheme
        ]
        line = np.polynomial.Polynomial.fit(*zip(*points, strict=True), 1)
        work[scheme] = lambda cost, line=line: max(0.0, float(line(cost.bytes)))
    return work


def _extend(rows: list[dict], fit: Fit, settings: Settings, head: dict) -> None:
    """Prints and draws the model's times on more hosts, each with its own cores."""
    hosts = [1 << k for k in range(1, MOST.bit_length())]
    times = {}
    for scheme in FORMULAS:
        of_scheme = [row for row in rows if row["scheme"] == scheme]
        if of_scheme:
            work = _work(of_scheme)[scheme]
            costs = [_cost(scheme, n, of_scheme[0]) for n in hosts]
            times[scheme] = [fit.time(scheme, cost, work(cost)) for cost in costs]
    lines = [
        {"hosts": n} | {name: taken[i] for name, taken in times.items()}
        for i, n in enumerate(hosts)
    ]
    columns = [
        Column("hosts", "hosts", "d"),
        *(Column(name, name, ".3f") for name in times),
    ]
    title = "seconds on hosts with cores of their own, by the model"
    table.show(lines, columns, title)
    image, ((axes,),) = figure.panels(size=(6.5, 4.5))
    for name, taken in times.items():
        (drawn,) = axes.loglog(hosts, taken, label=name, base=2)
        points = [(row["hosts"], _time(row)) for row in rows if row["scheme"] == name]
        axes.plot(*zip(*points, strict=True), "o", color=drawn.get_color(), markersize=4)
    axes.set(xlabel="hosts", ylabel="seconds")
    axes.set_title(
        f"{settings.workload} at {settings.rate}: model with cores of their own (lines),\n"
        f"measured on {head['cores']} shared cores (points)",
        fontsize=10,
    )
    axes.legend(fontsize=8)
    name = f"scale-{settings.workload}-{settings.rate}"
    figure.save(name, lines, image)
    say(f"\nwritten: {name} as CSV and PNG")


if __name__ == "__main__":
    sys.exit(main())
