"""Times the sides of a comparison on every rank of a testbed job, in turn.

A side is one of the programs that are compared. Every rank reports when its samples began
and ended, and the time of a step is computed from all of them: `together` makes one row of
the rows of all ranks. JAX is not needed here.
"""

import statistics
from collections.abc import Sequence
from typing import Protocol

from benchmarks.testbed import host, network


# The seconds that a sample takes, about: enough for the cost of starting it to be small.
SAMPLE = 0.5
LEAST_CALLS, MOST_CALLS = 3, 20
# Bytes for each host that a link may carry in addition to the messages of a call: gloo's
# headers, and the messages of the coordinator.
OTHER = 2048


class Side(Protocol):
    """A program that all ranks run together.

    Attributes:
        name: Its name in tables.
        compiled: Seconds that it took to compile.
    """

    name: str
    compiled: float

    def run(self) -> None:
        """Runs once, and waits for the result."""

    def wire(self) -> float | None:
        """Returns the bytes that a rank sent in the last run, if the side counts them."""


def timed(
    here: host.Here, sides: Sequence[Side], rounds: int, calls: int | None = None
) -> list[dict]:
    """Runs the sides in turn, and returns for each a row of this rank's measurements.

    The first turn is not counted: processes that have just compiled take up to twice as
    much processor time in their first second.

    Args:
        here: This host.
        sides: The sides.
        rounds: The number of samples of each side.
        calls: The number of runs in a sample; if None, as many as take half a second.
    """
    a_sample, samples = {}, {side.name: [] for side in sides}
    wires = {side.name: [] for side in sides}
    for side in sides:
        a_sample[side.name] = calls or _calls(here, side)
        _sample(here, side, a_sample[side.name])
    for _ in range(rounds):
        for side in sides:
            samples[side.name].append(_sample(here, side, a_sample[side.name]))
            wires[side.name].append(side.wire())
    return [
        {
            "scheme": side.name,
            "calls": a_sample[side.name],
            "compile": side.compiled,
            "wire": _mean(wires[side.name]),
            "spans": [(s.begun, s.ended) for s in samples[side.name]],
            "cpu": [s.cpu / a_sample[side.name] for s in samples[side.name]],
            # The first run of a sample, which synchronizes ranks, is not timed, but sends.
            "sent": [_share(s.sent, a_sample[side.name] + 1) for s in samples[side.name]],
            "received": [
                _share(s.received, a_sample[side.name] + 1) for s in samples[side.name]
            ],
        }
        for side in sides
    ]


def together(hosts: int, of_ranks: Sequence[dict]) -> dict:
    """Returns one row from the rows of all ranks.

    It has the fields of the first rank's row without its samples, and `seconds`, one for
    each sample; `cpu`, the mean over ranks; the bytes `sent` by a rank, the mean over
    ranks; the bytes of the `busiest` link; and `network`, the seconds that these bytes take
    at the row's `rate`.
    """
    row = {key: value for key, value in of_ranks[0].items() if key not in _BY_SAMPLE}
    samples = zip(*(row["spans"] for row in of_ranks), strict=True)
    row["hosts"] = hosts
    row["seconds"] = [host.seconds_together(spans) / row["calls"] for spans in samples]
    row["cpu"] = statistics.fmean(statistics.median(row["cpu"]) for row in of_ranks)
    if of_ranks[0]["sent"][0] is None:
        return row | {"sent": None, "busiest": None, "network": None}
    row["sent"] = statistics.fmean(statistics.median(row["sent"]) for row in of_ranks)
    both = [row[way] for row in of_ranks for way in ("sent", "received")]
    row["busiest"] = max(statistics.median(counts) for counts in both)
    row["network"] = 8 * row["busiest"] / network.bits_per_second(row["rate"])
    return row


_BY_SAMPLE = ("spans", "cpu", "sent", "received")


def _mean(counts):
    return None if None in counts else sum(counts) / len(counts)


def _share(count, calls):
    return None if count is None else count / calls


def _calls(here: host.Here, side: Side) -> int:
    once = max(here.gather(_sample(here, side, 1).seconds))
    return max(LEAST_CALLS, min(MOST_CALLS, round(SAMPLE / once)))


def _sample(here: host.Here, side: Side, calls: int) -> host.Section:
    with here.section() as section:
        # Ranks leave the barrier one after another; a first run synchronizes them.
        side.run()
        section.begin()
        for _ in range(calls):
            side.run()
    return section
