"""Checks and times ways to add up arrays, on every rank of a testbed job.

All are checked against the float64 sum, and rank against rank as bytes; then they run in
turn, in every round each once. JAX is not needed here: PyTorch's sides run without it.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from benchmarks.data import workloads
from benchmarks.harness import settings, sides
from benchmarks.harness.settings import option
from benchmarks.testbed import host, network


@dataclasses.dataclass(frozen=True)
class Settings(settings.Settings):
    """Adds up sparse gradients by every scheme, on a network of a given rate."""

    PROGRAM = "benchmarks.network.communication"
    hosts: tuple[int, ...] = option((2, 4, 8, 16), "numbers of hosts")
    rate: str = option("250mbit", "of each link, each way")
    more_rates: tuple[str, ...] = option(("100mbit", "1gbit"), "for some workloads")
    more: tuple[str, ...] = option(("lstm", "deepfm"), "workloads measured at more rates")
    workloads: tuple[str, ...] = option(
        ("lstm", "deepfm", "nmt", "topk", "language", "translation", "clicks"),
        "workloads of benchmarks.data.workloads",
    )
    # From five hosts on Zen is Balanced Parallelism, which can be named too: "balanced".
    schemes: tuple[str, ...] = option(
        ("psum", "zen", "hierarchical", "agsparse", "sparcml", "omnireduce", "sparseps"),
        "sides of benchmarks.network.schemes",
    )
    rounds: int = option(3, "samples of each side")
    peers: str | None = option(
        None, "the Python of an environment with torch", recorded="PYTHON"
    )
    timeout: float = option(3600.0, "seconds for each number of hosts")
    name: str = option("communication", "of the files that are written")

    def __post_init__(self):
        super().__post_init__()
        for rate in (self.rate, *self.more_rates):
            network.bits_per_second(rate)
        if unknown := set(self.workloads) - set(workloads.all_workloads()):
            raise ValueError(
                f"there is no workload {min(unknown)!r}; see benchmarks.data.workloads"
            )


class Adder(sides.Side, Protocol):
    """One way to add up an array over all ranks."""

    def load(self, x: np.ndarray) -> None:
        """Takes this rank's array."""

    def total(self) -> np.ndarray:
        """The sum of the last run."""


def measure(
    here: host.Here,
    settings: Settings,
    adders: Sequence[Adder],
    group: Sequence[workloads.Workload],
) -> None:
    """Reports a row for each workload of a group, each rate and each side."""
    for workload in group:
        sets = workload.sets(here.ranks)
        gradient = workload.values(sets, here.rank)
        about = {
            "workload": workload.name,
            "shape": list(workload.shape),
            "density": float(sets.sum(1).max() / workload.units),
            "after": float(sets.any(0).sum() / workload.units),
        }
        wrong = {}
        for adder in adders:
            adder.load(gradient)
            wrong[adder.name] = _wrong(here, adder, workload, sets)
        more = settings.more_rates if workload.name in settings.more else ()
        for rate in (settings.rate, *more):
            here.set_rate(rate)
            for row in sides.timed(here, adders, settings.rounds):
                name = rate if here.shaped else "unshaped"
                here.report(**about, rate=name, wrong=wrong[row["scheme"]], **row)
        here.say(f"  {workload.name:15} {len(adders)} sides checked and timed")


def _wrong(here: host.Here, adder: Adder, workload: workloads.Workload, sets) -> int:
    """Wrong numbers of rank 0; all of them if another rank holds other bytes."""
    for _ in range(2):  # The second knows what the first saw.
        adder.run()
    total = adder.total()
    digests = here.gather(hashlib.sha256(total.tobytes()).hexdigest())
    if len(set(digests)) > 1:
        return total.size
    if here.rank:
        return here.gather(None)[0]
    exact, size = np.zeros(workload.shape), np.zeros(workload.shape)
    for rank in range(here.ranks):
        x = workload.values(sets, rank)
        exact += x
        size += np.abs(x)
    room = (here.ranks + 2) * np.finfo(np.float32).eps * size
    return here.gather(int((~(np.abs(total - exact) <= room)).sum()))[0]
