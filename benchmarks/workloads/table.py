"""The table of the examples' workloads, from the recorded rows, in examples/README.md.

    python -m benchmarks.workloads table

writes what stands between the two markers there. No figure of it is written by hand, and a
test holds that it is what this would write. What is not recorded yet has a dash.
"""

import json
import pathlib
import re
import statistics
from collections.abc import Sequence

from benchmarks.harness import results
from benchmarks.workloads.papers import FIGURES


ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "examples" / "README.md"
BLOCK = re.compile(r"(<!-- workloads: .*? -->\n).*?(<!-- end of workloads -->)", re.S)
JAX = "jax0.10.2"
HOSTS = (4, 16)
# Which score of a run is shown, the first that it has; and what it is called.
SCORES = {
    "accuracy": "accuracy",
    "held_out_loss": "held-out loss",
    "final_loss": "loss",
}
NOTHING = "-"


class Recorded(results.Results):
    """A result file of the workloads; no rows where there is none."""

    def __init__(self, name: str, folder: pathlib.Path = RESULTS):
        path = folder / f"{name}-{JAX}.jsonl"
        if path.exists():
            super().__init__(path)
        else:
            self.name, self.head, self.rows = path.name, {}, []

    def source(self) -> str:
        """Where the figures are, on which machine and by which command they were made."""
        return f"[`{self.name}`](../benchmarks/results/{self.name}): {self.measured()}"


def block(folder: pathlib.Path = RESULTS) -> str:
    """What stands between the markers.

    Args:
        folder: Of the result files.
    """
    accuracy, network, curves = (
        Recorded(f"workloads-{part}", folder) for part in ("accuracy", "network", "curves")
    )
    files = [each for each in (accuracy, network, curves) if each.rows]
    if not files:
        return "Nothing of it is recorded yet.\n"
    head = ["example", "system", "reaches", "bytes a step"]
    head += [f"steps/s, {hosts} hosts" for hosts in HOSTS] + ["the paper"]
    lines = [_line(head), _line(["---"] * 2 + ["---:"] * 4 + ["---"])]
    for example in FIGURES:
        lines += [_line(cells) for cells in rows_of(example, accuracy, network)]
    parts = ["\n".join(lines), *_notes(accuracy, network, curves)]
    parts.append("\n".join(["From\n", *(f"* {each.source()}" for each in files)]))
    return "\n\n".join(parts) + "\n"


def rows_of(example: str, accuracy: Recorded, network: Recorded) -> list[list[str]]:
    """The cells of an example's rows, one for each system that has a figure."""
    mine = accuracy.where(example=example)
    if mine:  # of the last recording
        of = {key: mine[-1][key] for key in ("steps", "devices")}
        mine = accuracy.where(example=example, **of)
    timed = {
        hosts: _last_size(network.where(example=example, hosts=hosts)) for hosts in HOSTS
    }
    every = [row["scheme"] for rows in (mine, *timed.values()) for row in rows]
    made = []
    for scheme in dict.fromkeys(every):
        runs = [row for row in mine if row["scheme"] == scheme]
        dense = [row for row in mine if row["scheme"] == "dense"]
        name = "" if made else example.replace("_", " ")
        cells = [name, scheme, reaches(runs), _bytes(runs, dense)]
        cells += [_rate(timed[hosts], scheme) for hosts in HOSTS]
        made.append([*cells, FIGURES[example].get(scheme, "")])
    return made


def reaches(runs: Sequence[dict]) -> str:
    """The mean score of several seeds after the same steps, and its standard deviation."""
    for key, name in SCORES.items():
        values = [run[key] for run in runs if key in run]
        if values:
            deviation = statistics.pstdev(values)
            return f"{name} {statistics.fmean(values):.4f} ± {deviation:.4f}"
    return NOTHING


def _bytes(runs, dense):
    if not runs:
        return NOTHING
    own = statistics.fmean(run["wire_bytes"] for run in runs)
    if not dense or runs[0]["scheme"] == "dense":
        return f"{own:,.0f}"
    whole = statistics.fmean(run["wire_bytes"] for run in dense)
    return f"{own:,.0f} ({whole / own:.1f} times less)"


def _rate(rows, scheme):
    """Steps a second, and in brackets how many times those of dense gradients."""
    step = {row["scheme"]: statistics.median(row["seconds"]) for row in rows}
    if scheme not in step:
        return NOTHING
    own = f"{1 / step[scheme]:.2f}"
    if scheme == "dense" or "dense" not in step:
        return own
    return f"{own} ({step['dense'] / step[scheme]:.1f})"


def _last_size(rows):
    """The rows of the model that was measured last: an example may have several sizes."""
    return [row for row in rows if row["numbers"] == rows[-1]["numbers"]]


def _notes(accuracy, network, curves):
    """What the columns are, and what the curves say."""
    notes = []
    if accuracy.rows:
        row = accuracy.rows[-1]
        seeds = len({row["seed"] for row in accuracy.rows})
        notes.append(
            f"Scores are those after {row['steps']} steps on {row['devices']} simulated "
            f"devices, {seeds} seeds, mean ± standard deviation; bytes are those that a "
            "rank sends there, by the library's count, in brackets how many times less "
            "than dense."
        )
    if network.rows:
        row = network.rows[-1]
        sizes = dict.fromkeys(
            (r["example"], r["numbers"], json.dumps(r.get("tables")))
            for r in network.rows
            if r["scheme"] == "dense"
        )
        about = "; ".join(_size(*size) for size in sizes)
        notes.append(
            f"Steps a second on hosts with links of {row['rate'].replace('mbit', '')} "
            "Mbit/s, all of them on two shared cores, systems in turn, in brackets times "
            "dense of the same run; PyTorch (DistributedDataParallel over gloo) right "
            f"after them. Models there: {about}."
        )
    shares = [row for row in curves.rows if row["scheme"] != "dense"]
    if shares:
        told = "; ".join(
            f"{row['example'].replace('_', ' ')}, {row['scheme']}: {_share(row)}"
            for row in shares
        )
        plot = curves.name.replace(".jsonl", ".png")
        notes.append(
            f"Time to the loss with which dense gradients end, on {shares[0]['hosts']} "
            f"hosts, over the time of dense: {told}.\n\n"
            f"![Loss over wall-clock](../benchmarks/results/{plot})"
        )
    return notes


def _size(example, numbers, tables):
    shapes = json.loads(tables) or []
    held = sum(rows * width for rows, width in shapes) / numbers
    each = " and ".join(dict.fromkeys(f"{rows:,} x {width}" for rows, width in shapes))
    tables = "a table" if len(shapes) == 1 else f"{len(shapes)} tables"
    text = f"{example.replace('_', ' ')}, {numbers:,} numbers"
    return text + (f", {held:.0%} in {tables} of {each}" if shapes else "")


def _share(row):
    return "not reached" if row["share"] is None else f"{row['share']:.2f}"


def _line(cells):
    return "| " + " | ".join(cells) + " |"


def readme(text: str, folder: pathlib.Path = RESULTS) -> str:
    """The page's text with the table that results make."""
    return BLOCK.sub(lambda found: found[1] + block(folder) + found[2], text)


def main(argv: Sequence[str] = ()) -> int:
    if argv:
        raise SystemExit(f"The table takes no arguments, got {' '.join(argv)}.")
    PAGE.write_text(readme(PAGE.read_text()))
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 0
