"""Runs cases, program by program: hypothesis draws what each is given.

Programs come in groups, whose memory is given back behind them. What fails is shrunk to the
fewest units and the smallest numbers that still fail, and said in one line of Python, which
belongs into `kept`.
"""

import collections
import dataclasses
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, strategies as st

from tests.fuzz import laws, programs
from tests.fuzz.pool import LAWS, Program


GROUP = 12
SETTINGS = hypothesis.settings(
    deadline=None,
    database=None,
    derandomize=False,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,
    report_multiple_bugs=False,
)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A case that breaks its law, shrunk."""

    program: Program
    data: Any
    error: str

    def __str__(self):
        return f"    ({short(self.program)}, {short(self.data)}),\n{self.error}"


@dataclasses.dataclass
class Tally:
    """What was tried.

    Attributes:
        cases: By law.
        ways: How many cases of a law went each way, by (law, way); see `ways`.
        programs: How many were compiled.
        seconds: What it took.
        failures: What broke a law.
    """

    cases: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    ways: collections.Counter[tuple[str, str]] = dataclasses.field(
        default_factory=collections.Counter
    )
    programs: int = 0
    seconds: float = 0.0
    failures: list[Failure] = dataclasses.field(default_factory=list)

    def __str__(self):
        by_law = ", ".join(f"{law} {self.cases[law]:,}" for law in LAWS if self.cases[law])
        return (
            f"{sum(self.cases.values()):,} cases ({by_law}), {self.programs} programs, "
            f"{self.seconds:.0f} s, {len(self.failures)} failures"
        )


def short(value: Any) -> str:
    """A dataclass as Python that makes it, without what is as always."""
    default = type(value)
    fields = [
        f"{field.name}={getattr(value, field.name)!r}"
        for field in dataclasses.fields(default)
        if getattr(value, field.name) != field.default
    ]
    return f"{default.__name__}({', '.join(fields)})"


def run(
    pool: Sequence[Program],
    cases: int,
    seed: int = 0,
    seconds: float = np.inf,
    say: Callable[[str], None] = lambda line: None,
) -> Tally:
    """Gives so many cases to the programs, and stops behind so many seconds.

    Args:
        pool: The programs.
        cases: How many cases they get together.
        seed: Of what hypothesis draws.
        seconds: When no further group is begun.
        say: Is told what failed, and how far it is, a line a group.
    """
    tally, start, before = Tally(), time.perf_counter(), programs.compiled_so_far
    groups = [pool[i : i + GROUP] for i in range(0, len(pool), GROUP)]
    done = 0
    for number, group in enumerate(groups):
        share = round(cases * (done + len(group)) / len(pool))
        share -= round(cases * done / len(pool))
        done += len(group)
        failed = len(tally.failures)
        _run_group(group, share, seed + number, tally)
        programs.forget()
        tally.seconds = time.perf_counter() - start
        tally.programs = programs.compiled_so_far - before
        for failure in tally.failures[failed:]:
            say(f"FAILED\n{failure}")
        say(f"group {number + 1} of {len(groups)}: {tally}")
        if tally.seconds > seconds:
            break
    return tally


def _run_group(group, cases, seed, tally):
    """All cases of a group, each program's as many; one that fails gets no more."""
    before = 0
    for number, program in enumerate(group):
        behind = round(cases * (number + 1) / len(group))
        failure = find_failure([program], behind - before, seed * GROUP + number, tally)
        before = behind
        if failure is not None:
            tally.failures.append(failure)


def find_failure(
    group: Sequence[Program], cases: int, seed: int, tally: Tally
) -> Failure | None:
    """The first case that breaks a law, shrunk; None if none of so many does."""
    if not cases:
        return None
    last: list[Any] = []

    def of_program(program):
        return st.tuples(st.just(program), laws.data_of(program))

    @hypothesis.seed(seed)
    @hypothesis.settings(SETTINGS, max_examples=cases)
    @hypothesis.given(st.sampled_from(list(group)).flatmap(of_program))
    def hold(case):
        tally.cases[case[0].law] += 1
        try:
            went = laws.check(*case)
        except Exception as error:
            last[:] = *case, error
            raise
        for way in went:
            tally.ways[case[0].law, way] += 1

    try:
        hold()
    except Exception as error:
        if not last:
            raise
        program, data, seen = last
        told = "".join(traceback.format_exception(seen)[-4:])
        if isinstance(error, hypothesis.errors.Flaky):
            told += f"\n{error}"
        return Failure(program, data, told)
    return None


def say(line: str) -> None:
    """Writes a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
