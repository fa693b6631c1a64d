"""Cases drawn by hypothesis against the law: `make fuzz`.

    python -m tests.fuzz [--cases 10000] [--seed 0] [--programs 400] [--law sum] [--record]

Draws programs from the seed and gives them cases, in two processes, each with half of the
programs. Says how far it is after each group of programs, and at the end how many cases
there were of which law. A case that fails is shrunk and printed as a line for
`tests/fuzz/kept.py`, whose cases come first, here and in the tests. Another seed draws
other programs and cases. Where some way that cases should go was gone by none of thousands,
that is a failure, too (`tests/fuzz/ways.py`). --record writes how many cases of each law
there were, and how many failed, into benchmarks/results.
"""

import argparse
import concurrent.futures
import functools
import multiprocessing
import sys
import time

from benchmarks.harness.record import Recorder
from tests.fuzz import campaign, pool, shares, ways


# With fewer cases some ways may be gone by none, and that is no failure.
MANY = 5000


def main() -> int:
    """Runs what the command line says; the exit status is 1 where a case failed."""
    given, start = _arguments(), time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(given.workers, context) as processes:
        told = [*processes.map(functools.partial(shares.run, given), range(given.workers))]
    total, of_kept = campaign.Tally(), sum(failed for failed, _ in told)
    for _, tally in told:
        total.cases.update(tally.cases)
        total.ways.update(tally.ways)
        total.programs += tally.programs
        total.failures += tally.failures
    total.seconds = time.perf_counter() - start
    campaign.say(f"{total}, {of_kept} of those that once failed")
    missed = []
    if total.cases.total() >= MANY and not given.law:
        missed = ways.missing(total.ways)
    for way in missed:
        campaign.say(f"No case went this way: {way}")
    if given.record:
        _record(given, total, of_kept, missed)
    return int(bool(of_kept or total.failures or missed))


def _record(given, total, of_kept, missed):
    """Writes a file with a row for each law, and one for all."""
    told = Recorder("fuzz", " ".join(["python -m tests.fuzz", *sys.argv[1:]]))
    for law in pool.LAWS:
        if total.cases[law]:
            gone = {way: n for (of, way), n in sorted(total.ways.items()) if of == law}
            failures = sum(failure.program.law == law for failure in total.failures)
            told.add(law=law, cases=total.cases[law], failures=failures, ways=gone)
    told.add(
        law="all",
        cases=total.cases.total(),
        failures=of_kept + len(total.failures),
        programs=total.programs,
        processes=given.workers,
        missed=missed,
        seconds=round(total.seconds),
    )
    campaign.say(f"wrote {told.write()}")


def _arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", type=int, default=10_000, help="how many; 10,000")
    parser.add_argument("--seed", type=int, default=0, help="of programs and cases; 0")
    parser.add_argument("--programs", type=int, default=400, help="how many; 400")
    parser.add_argument("--law", choices=[*pool.LAWS], help="programs of this law alone")
    parser.add_argument("--workers", type=int, default=2, help="processes; 2")
    parser.add_argument("--minutes", type=float, default=60, help="the most; 60")
    parser.add_argument("--record", action="store_true", help="write what was counted")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
