"""What a collective takes, and the work of a step, each from measurements of it alone.

A collective of the testbed, by rows of `benchmarks.network.messages`:

    processor time of a rank = fixed + a message * messages + a byte * bytes sent
    time = longer(share * processor time * ranks / cores, stretch * link) + wake * steps

where `link` is the time of its bytes on the link, `steps` how many messages wait for one
another, and ranks / cores how many ranks share a core: 1 on hosts of their own. While the
bytes of one rank are on their way another computes, so the longer of the two counts: the
fourth root of the sum of fourth powers. Each kind of collective has six numbers, none below
0, by least squares: of relative errors for the processor time, of logarithms for the time.

The work of a step is the processor time of a rank less that of its collectives: a line in
the bytes that it sends, for each scheme. Nothing is fitted to the time of a step.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize

from benchmarks.network.scale.rounds import Round
from benchmarks.testbed import network


class Here(NamedTuple):
    """Where a step is to run.

    Attributes:
        ranks: How many hosts.
        rate: Bits a second of each link.
        shared: How many ranks share a core, at least 1.
    """

    ranks: int
    rate: float
    shared: float

    @classmethod
    def testbed(cls, row: dict, cores: int) -> "Here":
        """Where a row was measured: all hosts on so many cores."""
        rate = network.bits_per_second(row["rate"])
        return cls(row["hosts"], rate, max(1.0, row["hosts"] / cores))


def steps(collective: str, ranks: int) -> int:
    """How many messages of a collective wait for one another, with gloo."""
    rounds = (ranks - 1).bit_length()
    ring = ranks - 1
    return {"pmax": rounds, "psum": 2 * ring, "all_gather": ring}.get(collective, 1)


def messages(collective: str, ranks: int) -> int:
    """How many messages a rank sends for it."""
    return ranks - 1 if collective == "all_to_all" else steps(collective, ranks)


class Collective(NamedTuple):
    """What a kind of collective takes.

    Attributes:
        fixed: Seconds of processor time a call.
        a_message: Seconds of processor time a message.
        a_byte: Seconds of processor time a byte sent.
        share: How much of the processor time, of ranks that share cores, is waited for.
        stretch: How many times as long as on the link its bytes take.
        wake: Seconds a message that waits for the one before.
    """

    fixed: float
    a_message: float
    a_byte: float
    share: float
    stretch: float
    wake: float

    def cpu(self, one: Round, ranks: int) -> float:
        """Processor time of a rank."""
        count = messages(one.collective, ranks)
        return self.fixed + self.a_message * count + self.a_byte * one.sent(ranks)

    def time(self, one: Round, here: Here) -> float:
        """Seconds from its first rank's begin to its last one's end."""
        link = 8 * one.sent(here.ranks) / here.rate
        waits = self.wake * steps(one.collective, here.ranks)
        busy = here.shared * self.cpu(one, here.ranks)
        return float(longer(self.share * busy, self.stretch * link)) + waits


def seconds(row: dict) -> float:
    """The median of a row's samples; earlier files have one number."""
    found = row["seconds"]
    return statistics.median(found) if isinstance(found, list) else found


def round_of(row: dict) -> Round:
    """The round that a row of `benchmarks.network.messages` is of."""
    if "array" in row:
        return Round(row["collective"], row["array"])
    # A sum of as many bytes as an all-to-all sends.
    count = row["hosts"] // 2 if row["collective"] == "psum" else 1
    return Round(row["collective"], count * row["bytes"])


def fitted(rows: Iterable[dict], cores: int) -> dict[str, Collective]:
    """What each kind of collective takes, by the name of the kind."""
    kinds: dict[str, list[dict]] = {}
    for row in rows:
        kinds.setdefault(row["collective"], []).append(row)
    return {kind: _fitted(of_kind, cores) for kind, of_kind in kinds.items()}


def _fitted(rows: Sequence[dict], cores: int) -> Collective:
    cpu_terms, terms = [], []
    for row in rows:
        one, here = round_of(row), Here.testbed(row, cores)
        sent = one.sent(here.ranks)
        cpu_terms.append((1.0, messages(one.collective, here.ranks), sent))
        link, waits = 8 * sent / here.rate, steps(one.collective, here.ranks)
        terms.append((here.shared * row["cpu"], link, waits))
    of_cpu = least_squares(cpu_terms, [row["cpu"] for row in rows])
    busy, link, waits = np.asarray(terms).T
    wanted = np.log([seconds(row) for row in rows])

    def off(logarithms):
        share, stretch, wake = np.exp(logarithms)
        return np.log(longer(share * busy, stretch * link) + wake * waits) - wanted

    found = optimize.least_squares(off, np.log([1.0, 1.2, 1e-4]), bounds=(-20, 3))
    return Collective(*of_cpu, *np.exp(found.x).tolist())


def longer(a: Any, b: Any) -> Any:
    """The longer of two times, and a little more where they are alike."""
    return (a**4 + b**4) ** 0.25


def least_squares(
    terms: Sequence[Sequence[float]], results: Sequence[float]
) -> list[float]:
    """Factors of the terms, none below 0, by least squares of relative errors."""
    wanted = np.asarray(results)[:, None]
    found, _ = optimize.nnls(np.asarray(terms) / wanted, np.ones(len(results)))
    return found.tolist()


class Work(NamedTuple):
    """The work of a step beside its collectives.

    Attributes:
        fixed: Seconds of processor time.
        a_byte: Seconds a byte that a rank sends.
    """

    fixed: float
    a_byte: float

    def cpu(self, sent: float) -> float:
        """Processor time of a rank that sends so many bytes."""
        return self.fixed + self.a_byte * sent


class Step(NamedTuple):
    """A step that was measured.

    Attributes:
        row: Of `benchmarks.network.communication`.
        rounds: What it sends.
    """

    row: dict
    rounds: list[Round]

    @property
    def sent(self) -> float:
        """Bytes that a rank sends."""
        return sent(self.rounds, self.row["hosts"])


def sent(rounds: Iterable[Round], ranks: int) -> float:
    """Bytes that one rank sends in all of them."""
    return sum(one.sent(ranks) for one in rounds)


def work_of(steps: Sequence[Step], kinds: dict[str, Collective]) -> Work:
    """The work of one scheme: what processor time its collectives do not explain."""
    left = []
    for step in steps:
        ranks = step.row["hosts"]
        known = sum(kinds[one.collective].cpu(one, ranks) for one in step.rounds)
        # No step has none at all; relative errors want something.
        left.append(max(step.row["cpu"] - known, 0.02 * step.row["cpu"]))
    return Work(*least_squares([(1.0, step.sent) for step in steps], left))


def time(
    rounds: Iterable[Round], work: Work, kinds: dict[str, Collective], here: Here
) -> float:
    """Seconds of a step."""
    rounds = list(rounds)
    waited = sum(kinds[one.collective].time(one, here) for one in rounds)
    return waited + here.shared * work.cpu(sent(rounds, here.ranks))
