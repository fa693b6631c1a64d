"""Holds kernels to their checks, executed from their PTX: `make ptx`.

    python -m tests.ptx [CASE ...] [--archs 80 90 100] [--seeds N] [--first 0] [--record]

A CASE is a backend and a check, as triton/partition.py: all if none is given. Each is run
on every architecture, in the orders of some seeds, in two processes. Says what each found,
a fault with the shortest order of warps in which it shows. An opcode that a kernel uses and
that has no test of its own is a failure, too. --record writes what was launched into
benchmarks/results, in place of earlier rows of the same runs.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import time

from benchmarks.harness.record import Recorder, say
from tests.ptx import opcodes, runs
from tests.ptx.compiler import ARCHITECTURES


def main() -> int:
    """Runs what the command line says; the exit status is 1 where anything is wrong."""
    given, start = _arguments(), time.perf_counter()
    names = {"/".join(case): case for case in runs.CASES}
    if unknown := sorted({*given.cases} - {*names}):
        say(f"There is no {unknown[0]!r}; there are {', '.join(names)}.")
        return 2
    cases = [names[name] for name in given.cases] or runs.CASES
    seeds = range(given.first, given.first + given.seeds)
    command = " ".join(["python -m tests.ptx", *sys.argv[1:]])
    recorder = Recorder("ptx", command, keys=("case", "arch", "seed"))
    found = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(given.workers, context) as pool:
        tasks = [
            pool.submit(runs.alone, case, arch, seed)
            for case in cases
            for arch in given.archs
            for seed in seeds
        ]
        for done in concurrent.futures.as_completed(tasks):
            found.append(done.result())
            say(str(found[-1]))
    used = {one for each in found for one in each.opcodes}
    untested = sorted(used - opcodes.tested())
    if untested:
        say(f"Without a test of their own: {', '.join(untested)}.")
    faults = [one for one in found if one.fault]
    minutes = (time.perf_counter() - start) / 60
    say(
        f"{len(found)} runs, {sum(x.launches for x in found):,} launches, "
        f"{sum(x.steps for x in found):,} steps, {len(used)} opcodes, {len(faults)} at "
        f"fault, {minutes:.1f} minutes."
    )
    if given.record:
        for one in sorted(found, key=lambda x: (x.name, x.arch, x.seed)):
            recorder.add(
                case=one.name,
                arch=ARCHITECTURES[one.arch],
                seed=one.seed,
                launches=one.launches,
                steps=one.steps,
                seconds=round(one.seconds, 1),
                opcodes=len(one.opcodes),
                fault=one.fault,
            )
        if not given.cases:
            recorder.add(opcodes=sorted(used), minutes=round(minutes, 1))
        say(f"wrote {recorder.write()}")
    return 1 if faults or untested else 0


def _arguments():
    parser = argparse.ArgumentParser(
        "python -m tests.ptx", description="Holds kernels to their checks, from their PTX."
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="as triton/partition.py")
    parser.add_argument("--archs", nargs="+", type=int, default=[*ARCHITECTURES])
    parser.add_argument("--seeds", type=int, default=1, help="how many orders of each")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--record", action="store_true", help="into benchmarks/results")
    given = parser.parse_args()
    if unknown := {*given.archs} - {*ARCHITECTURES}:
        parser.error(f"no architecture {unknown.pop()}: there are {[*ARCHITECTURES]}")
    return given


if __name__ == "__main__":
    sys.exit(main())
