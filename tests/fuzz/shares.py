"""The share of a process in `python -m tests.fuzz`."""

import argparse
import os

from tests import conftest
from tests.fuzz import campaign, kept, pool, ways


def run(given: argparse.Namespace, number: int) -> tuple[int, campaign.Tally]:
    """How many of the kept cases failed, which the first process runs, and the tally."""
    # Read when the first program is compiled.
    flags = os.environ.get("XLA_FLAGS", ""), *conftest.COMPILE_FAST
    os.environ["XLA_FLAGS"] = " ".join(flags)
    programs = _programs(given)[number :: given.workers]
    cases = round(given.cases * len(programs) / given.programs)
    failed = kept.failures() if number == 0 else 0
    seed = 1000 * given.seed + number + 1
    say = lambda line: campaign.say(f"{number + 1}/{given.workers}  {line}")
    return failed, campaign.run(programs, cases, seed, 60.0 * given.minutes, say)


def _programs(given):
    """Drawn ones; where there are many also those by which cases go every way."""
    chosen = ways.chosen(given.law)
    if given.programs < 2 * len(chosen):
        return pool.drawn(given.seed, given.programs, given.law)
    rest = pool.drawn(given.seed, given.programs - len(chosen), given.law)
    return [*chosen, *rest]
