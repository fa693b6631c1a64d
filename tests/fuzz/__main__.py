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
import collections
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

from benchmarks.harness.record import Recorder
from tests import conftest
from tests.fuzz import campaign, kept, pool, ways


# With fewer cases some ways may be gone by none, and that is no failure.
MANY = 5000


def main() -> int:
    """Runs what the command line says; the exit status is 1 where a case failed."""
    given = _arguments()
    if given.share:
        return _run(given)
    start = time.perf_counter()
    told, statuses = [], []
    command = [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]]

    def follow(share):
        child = subprocess.Popen(
            [*command, "--share", share], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("total "):
                told.append(json.loads(line.removeprefix("total ")))
            else:
                campaign.say(f"{share}  {line.rstrip()}")
        statuses.append(child.wait())

    shares = [f"{i + 1}/{given.workers}" for i in range(given.workers)]
    threads = [threading.Thread(target=follow, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(told) < given.workers:
        campaign.say("A process ended before its cases did.")
        return 1
    total = _added_up(told)
    cases, failures = total["cases"], sum(total["failures"].values())
    seconds = time.perf_counter() - start
    by_law = ", ".join(f"{law} {cases[law]:,}" for law in pool.LAWS)
    campaign.say(
        f"{cases.total():,} cases: {by_law}; {total['programs'].total()} programs "
        f"compiled, {seconds:.0f} s, {failures} failures"
    )
    gone = {tuple(key.split(": ", 1)): count for key, count in total["ways"].items()}
    missed = ways.missing(gone) if cases.total() >= MANY and not given.law else []
    for way in missed:
        campaign.say(f"No case went this way: {way}")
    if given.record:
        _record(given, total, seconds, missed)
    return int(any(statuses) or bool(missed))


def _run(given):
    """One process's share of the programs."""
    # Read when the first program is compiled.
    flags = os.environ.get("XLA_FLAGS", ""), *conftest.COMPILE_FAST
    os.environ["XLA_FLAGS"] = " ".join(flags)
    number, count = map(int, given.share.split("/"))
    programs = _programs(given)[number - 1 :: count]
    cases = round(given.cases * len(programs) / given.programs)
    failed = kept.failures() if number == 1 else 0
    seconds = 60.0 * given.minutes
    seed = 1000 * given.seed + number
    tally = campaign.run(programs, cases, seed, seconds, campaign.say)
    failures = collections.Counter(failure.program.law for failure in tally.failures)
    told = {
        "cases": tally.cases,
        "programs": {"all": tally.programs},
        "failures": failures | {"kept": failed},
        "ways": {f"{law}: {way}": n for (law, way), n in tally.ways.items()},
    }
    campaign.say(f"total {json.dumps(told)}")
    return int(failed + len(tally.failures) > 0)


def _programs(given):
    """Drawn ones; where there are many also those by which cases go every way."""
    chosen = ways.chosen(given.law)
    if given.programs < 2 * len(chosen):
        return pool.drawn(given.seed, given.programs, given.law)
    rest = pool.drawn(given.seed, given.programs - len(chosen), given.law)
    return [*chosen, *rest]


def _added_up(told: list[dict[str, Any]]) -> dict[str, collections.Counter]:
    """What the processes have told, together."""
    total = collections.defaultdict(collections.Counter)
    for one in told:
        for what, counts in one.items():
            total[what].update(counts)
    return total


def _record(given, total, seconds, missed):
    """Writes a file with a row for each law, and one for all."""
    told = Recorder("fuzz", " ".join(["python -m tests.fuzz", *sys.argv[1:]]))
    cases, failures = total["cases"], total["failures"]
    for law in pool.LAWS:
        if cases[law]:
            gone = {
                key.removeprefix(f"{law}: "): count
                for key, count in sorted(total["ways"].items())
                if key.startswith(f"{law}: ")
            }
            told.add(law=law, cases=cases[law], failures=failures[law], ways=gone)
    told.add(
        law="all",
        cases=cases.total(),
        failures=failures.total(),
        programs=total["programs"].total(),
        processes=given.workers,
        missed=missed,
        seconds=round(seconds),
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
    parser.add_argument("--share", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
