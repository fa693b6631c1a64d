"""Cases drawn by hypothesis against the law: `make fuzz`.

    python -m tests.fuzz [--cases 10000] [--seed 0] [--programs 400] [--law sum]

Draws programs from the seed and gives them cases, in two processes, each with half of the
programs. Says how far it is after each group of programs, and at the end how many cases
there were of which law. A case that fails is shrunk and printed as a line for
`tests/fuzz/kept.py`, whose cases come first, here and in the tests. Another seed draws
other programs and cases.
"""

import argparse
import os
import subprocess
import sys
import threading
import time

from tests import conftest


# Before JAX starts.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), *conftest.COMPILE_FAST]
)

from tests.fuzz import campaign, kept, pool


def main() -> int:
    """Runs what the command line says; the exit status is 1 where a case failed."""
    given = _arguments()
    if given.share:
        return _run(given)
    start = time.perf_counter()
    tallies, statuses = [], []
    command = [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]]

    def follow(share):
        child = subprocess.Popen(
            [*command, "--share", share], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("total "):
                tallies.append([int(number) for number in line.split()[1:]])
            else:
                campaign.say(f"{share}  {line.rstrip()}")
        statuses.append(child.wait())

    shares = [f"{i + 1}/{given.workers}" for i in range(given.workers)]
    threads = [threading.Thread(target=follow, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sums = [sum(column) for column in zip(*tallies, strict=True)]
    if len(tallies) < given.workers:
        campaign.say("A process ended before its cases did.")
        return 1
    *counts, programs, failures = sums
    by_law = ", ".join(f"{law} {n:,}" for law, n in zip(pool.LAWS, counts, strict=True))
    campaign.say(
        f"{sum(counts):,} cases: {by_law}; {programs} programs compiled, "
        f"{time.perf_counter() - start:.0f} s, {failures} failures"
    )
    return int(any(statuses))


def _run(given):
    """One process's share of the programs."""
    number, count = map(int, given.share.split("/"))
    programs = pool.drawn(given.seed, given.programs, given.law)[number - 1 :: count]
    cases = round(given.cases * len(programs) / given.programs)
    failed = kept.failures() if number == 1 else 0
    seconds = 60.0 * given.minutes
    seed = 1000 * given.seed + number
    tally = campaign.run(programs, cases, seed, seconds, campaign.say)
    for failure in tally.failures:
        campaign.say(f"FAILED\n{failure}")
    counts = [tally.cases[law] for law in pool.LAWS]
    failed += len(tally.failures)
    campaign.say(" ".join(map(str, ["total", *counts, tally.programs, failed])))
    return int(failed > 0)


def _arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", type=int, default=10_000, help="how many; 10,000")
    parser.add_argument("--seed", type=int, default=0, help="of programs and cases; 0")
    parser.add_argument("--programs", type=int, default=400, help="how many; 400")
    parser.add_argument("--law", choices=[*pool.LAWS], help="programs of this law alone")
    parser.add_argument("--workers", type=int, default=2, help="processes; 2")
    parser.add_argument("--minutes", type=float, default=60, help="the most; 60")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
