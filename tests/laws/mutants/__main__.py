"""Runs mutants.

    python -m tests.laws.mutants [--all | NAME ...]
    python -m tests.laws.mutants --of tests/wire/test_at_once.py

Copies the tree, makes one edit, runs the tests listed with it, the slow ones last, and goes
on with the next: a law that nothing can break is no law. Each mutant ends "caught", with
the first test that failed, or "MISSED"; the exit status is how many were missed. Before
the first edit the tests that are not slow must pass without one, and a slow one that has
noticed an edit must pass without it. Those at the seams take a quarter of an
hour on two cores, all of them more than an hour.

`--of` runs nothing: it lists where the edits are that a file of tests notices. Where one of
its tests fails, that is where to look.
"""

import argparse
import sys
import time

from tests import edits
from tests.laws.mutants import FAILS_ANYWAY, MUTANTS, control, run


def noticed_by(test: str) -> list[str]:
    """The places of the edits that a file of tests notices, a line each."""
    file = test.partition("::")[0]
    found = []
    for name, mutant in MUTANTS.items():
        # Some are noticed by all tests of a folder.
        if any(file.startswith(one.partition("::")[0]) for one in mutant.tests):
            module = edits.find(mutant.edit).file.relative_to(edits.ROOT)
            found.append(f"{module}  {mutant.edit.at}  {name}")
    return sorted(found)


def main(arguments: list[str]) -> int:
    """Runs the mutants named, or those at the seams; how many were missed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.laws.mutants", description="Runs mutants."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants; at the seams")
    parser.add_argument("--all", action="store_true", help="all mutants")
    parser.add_argument("--of", metavar="TEST", help="list those that a test notices")
    options = parser.parse_args(arguments)
    if options.of:
        found = noticed_by(options.of)
        print("\n".join(found) if found else f"No mutant is listed with {options.of}.")
        return 0
    for name in options.names:
        if name not in MUTANTS:
            parser.error(f"there is no mutant {name!r} in tests/laws/mutants/*.toml")
    every = [name for name, one in MUTANTS.items() if one.seam or options.all]
    names = options.names or every
    fails, test = control(MUTANTS[name] for name in names)
    if fails:
        parser.exit(1, f"{FAILS_ANYWAY.format(test)}\n")
    missed = 0
    for name in names:
        start = time.perf_counter()
        caught, test = run(MUTANTS[name])
        missed += not caught
        seconds = time.perf_counter() - start
        what = f"caught  {test}" if caught else "MISSED"
        print(f"{name:50} {seconds:4.0f} s  {what}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
