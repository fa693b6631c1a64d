"""Checks and times the sides of a comparison, on every rank of a testbed job.

A side is one way to add up an array over all ranks. All are checked against the float64
sum, and rank against rank as bytes; then they run in turn, in every round each once. Every
rank reports when its samples began and ended; what a step took follows from all of them.
"""

import hashlib
from typing import Protocol

import numpy as np

from benchmarks import workloads
from benchmarks.testbed import host


# A sample lasts about so many seconds, so that starting it weighs little.
SAMPLE = 0.5
LEAST_CALLS = 3
# Bytes for each host that may cross a link beside the messages of a call: their headers in
# gloo, and the coordinator.
OTHER = 2048


class Side(Protocol):
    """One way to add up an array over all ranks."""

    name: str
    compiled: float  # seconds that it took to compile

    def load(self, x: np.ndarray) -> None:
        """Takes this rank's array."""

    def run(self) -> None:
        """Adds up once, and waits for the sum."""

    def total(self) -> np.ndarray:
        """The sum of the last run."""

    def wire(self) -> float | None:
        """Bytes that a rank sent in the last run, by the side's own count if it has one."""


def measure(here: host.Here, settings: dict, sides: list[Side], group: list) -> None:
    """Reports a row for each workload of a group, each rate and each side."""
    for workload in group:
        sets = workload.sets(here.ranks)
        own = workload.values(sets, here.rank)
        found = {
            "workload": workload.name,
            "shape": list(workload.shape),
            "density": float(sets.sum(1).max() / workload.units),
            "after": float(sets.any(0).sum() / workload.units),
        }
        wrong = {}
        for side in sides:
            side.load(own)
            wrong[side.name] = _wrong(here, side, workload, sets)
        more = settings["more"].get(workload.name, [])
        for rate in [settings["rate"], *more]:
            here.set_rate(rate)
            for row in timed(here, sides, settings["rounds"]):
                name = rate if here.shaped else "unshaped"
                here.report(**found, rate=name, wrong=wrong[row["scheme"]], **row)
        here.say(f"  {workload.name:15} {len(sides)} sides checked and timed")


def timed(here: host.Here, sides: list[Side], rounds: int) -> list[dict]:
    """Runs the sides in turn, and tells of each what this rank saw of it.

    The first turn does not count: processes that were compiling until now take up to twice
    as much processor time in their first second.
    """
    calls, samples = {}, {side.name: [] for side in sides}
    wires = {side.name: [] for side in sides}
    for side in sides:
        once = max(here.gather(_sample(here, side, 1).seconds))
        calls[side.name] = max(LEAST_CALLS, min(20, round(SAMPLE / once)))
        _sample(here, side, calls[side.name])
    for _ in range(rounds):
        for side in sides:
            samples[side.name].append(_sample(here, side, calls[side.name]))
            wires[side.name].append(side.wire())
    return [
        {
            "scheme": side.name,
            "calls": calls[side.name],
            "compile": side.compiled,
            "wire": _mean(wires[side.name]),
            "spans": [(s.begun, s.ended) for s in samples[side.name]],
            "cpu": [s.cpu / calls[side.name] for s in samples[side.name]],
            "sent": [_of_one(s.sent, calls[side.name]) for s in samples[side.name]],
            "received": [_of_one(s.received, calls[side.name]) for s in samples[side.name]],
        }
        for side in sides
    ]


def _mean(counts):
    return None if None in counts else sum(counts) / len(counts)


def _of_one(count, calls):
    return None if count is None else count / calls


def _sample(here: host.Here, side: Side, calls: int) -> host.Section:
    with here.section() as section:
        # Ranks leave the barrier one after another; a first run brings them together.
        side.run()
        section.begin()
        for _ in range(calls):
            side.run()
    for way in ("sent", "received"):
        if (count := getattr(section, way)) is not None:
            setattr(section, way, count * calls / (calls + 1))
    return section


def _wrong(here: host.Here, side: Side, workload: workloads.Workload, sets) -> int:
    """Wrong numbers of rank 0; all of them if another rank holds other bytes."""
    for _ in range(2):  # The second knows what the first saw.
        side.run()
    total = side.total()
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
