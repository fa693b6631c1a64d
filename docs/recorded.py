"""Result files, and figures and tables of Markdown made of them."""

import pathlib
import statistics
import sys


# A script of docs/ finds what stands beside it, and no package.
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.harness import results
from benchmarks.harness.results import a_step as a_step, seconds as seconds


ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class Results(results.Results):
    """A result file, by its name without the ending, and the command that writes it."""

    def __init__(self, name, by=""):
        path = RESULTS / f"{name}.jsonl"
        if by and not path.exists():
            raise FileNotFoundError(f"{path.name} is not there; `{by}` records it.")
        super().__init__(path)

    def source(self):
        """Where the figures are, on which machine and by which command they were made."""
        return f"*From `benchmarks/results/{self.name}`: {self.measured()}.*"


def times(number):
    """So many times, to two digits, as tables have it."""
    return f"{number:.0f}" if number >= 9.95 else f"{number:.1f}"


def digits(number, count=3):
    """A number to so many digits, without an exponent."""
    text = f"{number:#,.{count}g}"
    return f"{number:,.0f}" if "e" in text or text.endswith(".") else text


def table(head, rows, left=1):
    """A table of Markdown, whose columns but the first are to the right."""
    line = lambda cells: "| " + " | ".join(map(str, cells)) + " |"
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join([line(head), line(rule), *map(line, rows)])


def spread(values, places):
    mean, deviation = statistics.mean(values), statistics.pstdev(values)
    return f"{mean:.{places}f} ± {deviation:.{places}f}"
