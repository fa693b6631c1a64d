"""Result files, and figures and tables of Markdown made of them."""

import json
import pathlib
import statistics


ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class Results:
    """A result file: its rows, and by which commands they were measured."""

    def __init__(self, name):
        path = RESULTS / f"{name}.jsonl"
        self.name = path.name
        self.head, *self.rows = map(json.loads, path.read_text().splitlines())

    def where(self, **wanted):
        return [r for r in self.rows if all(r.get(k) == v for k, v in wanted.items())]

    def one(self, **wanted):
        found = self.where(**wanted)
        assert len(found) == 1, (self.name, wanted, len(found))
        return found[0]

    def source(self):
        """Where the figures are, on which machine and by which command they were made."""
        runs = [self.head, *self.head.get("kept", [])]
        machines = sorted({f"{run['cores']} cores of {run['processor']}" for run in runs})
        newest = max(run["date"] for run in runs)
        return (
            f"*From `benchmarks/results/{self.name}`: JAX {self.head['jax']}, "
            f"{' and '.join(machines)}, {newest}, last by `{self.head['command']}`.*"
        )


def seconds(row):
    return statistics.median(row["seconds"])


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
