"""Whether the bounded part of the fuzzer notices libraries that are broken.

    python -m tests.fuzz.broken [NAME ...]

The names are of mutants in `tests.laws.mutants`, each of which has tests of its own; here
they are to be noticed by drawn cases alone, those that CI runs (`test_fuzz.py`).
"""

import sys
import time

from tests.laws import mutants


# By name: the law whose cases must notice.
BROKEN = {
    "there is no second round": "sum",
    "the string of a message is written into the first part's": "sum",
    "slots of no unit are placed": "sum",
    "a slot belongs to another unit": "sum",
    "for GPUs, what fills the longest message is not sent": "sum",
    "for GPUs, rounds before the last are not folded": "sum",
    "a residual does not come back": "tree",
    "a mean is a sum": "tree",
    "Ok-Topk forgets what others did not keep": "chosen",
    "negative indices count from the end": "entries",
    "unused rows are merged into the last": "rows",
    "a list of rows is cut short": "rows",
}


def main(names: list[str]) -> int:
    """Runs the libraries named, or all; how many were missed."""
    missed = 0
    for name in names or BROKEN:
        start, law = time.perf_counter(), BROKEN[name]
        tests = f"tests/fuzz/test_fuzz.py::test_cases_hold[{law}]"
        mutant = mutants.MUTANTS[name]._replace(tests=(tests,))
        caught, _ = mutants.run(mutant, "-n", "0")
        missed += not caught
        what = f"caught by cases of {law}" if caught else "MISSED"
        print(f"{name:60} {time.perf_counter() - start:4.0f} s  {what}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
