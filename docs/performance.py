"""Writes the pages that are made of records: performance.md, its tables, and faults.md.

`python docs/performance.py` writes them, and the chart of gains on the first pages;
`python -m benchmarks.charts` writes the charts. A test holds that they are what these would
write. No figure is written by hand: the numbers of a text are those of its chart.
"""

import re
import textwrap

import faults
import gains
import tables
from recorded import ROOT
from topics import devices, goals, steps, sums, training


PAGE = ROOT / "docs" / "performance.md"
# Each returns a title, a text, its chart, the conditions, and its tables.
SECTIONS = (
    *(sums.on_a_network, sums.by_scheme, sums.by_density, sums.without_zeros),
    *(steps.in_jit, steps.by_rows, steps.examples, steps.to_the_same_loss, steps.embrace),
    *(training.local_steps, training.local_clock, training.selecting, training.losses),
    training.sparsifiers,
    *(devices.kernels, devices.steps_of_a_rank, devices.compiling),
)
HEAD = """# Performance

<!-- Made by `python docs/performance.py` from benchmarks/results: do not edit. -->

One chart for each question. Below it are the conditions, and the result file, with the
date, the machine and the command of its last run. [All tables](performance_tables.md) have
every row, and [the last section](#goals-that-were-missed) lists the goals that were missed.

Unless a text says otherwise, a host is a process with its own network link, limited to the
rate that is named, and **all hosts share the two cores of one machine**. Their work adds
up: with more hosts, a system that sends less and computes more gains less. No network of
GPUs was measured. Ratios are of sides that alternated in one run. Results were checked in
the run that timed them. `benchmarks/README.md` describes how it was done, and
[It keeps training](faults.md) what happens when a host fails.
"""


def page():
    parts = [HEAD]
    for section in SECTIONS:
        title, text, chart, conditions, named = section()
        text = "\n\n".join(map(filled, text.split("\n\n")))
        shown = f"![{chart.says}](pictures/charts/{chart.name}.svg)"
        parts.append(
            f"## {title}\n\n{text}\n\n{shown}\n\n{caption(chart, conditions, named)}\n"
        )
    title, text, table = goals.missed()
    parts.append(f"## {title}\n\n{filled(text)}\n\n{table}\n")
    return "\n".join(parts)


def caption(chart, conditions, named):
    """What stands below a chart: how it was measured, and where all numbers are."""
    sources = "; ".join(
        f"[`{file.name}`](../benchmarks/results/{file.name}) ({file.measured()})"
        for file in chart.files
    )
    tables = [f"[{title}](performance_tables.md#{anchor(title)})" for title in named]
    numbers = f"[CSV](pictures/charts/{chart.name}.csv); tables: {'; '.join(tables)}"
    lines = (filled(conditions), f"From {sources}.", f"Numbers: {numbers}.")
    quoted = "\n\n".join(lines).split("\n")
    return "\n".join(f"> {line}".rstrip() for line in quoted)


def anchor(title):
    """That of a heading."""
    letters = "".join(x for x in title.lower() if x.isalnum() or x in " -_")
    return letters.replace(" ", "-")


def filled(text):
    """A paragraph in lines, none of which ends within a span of code."""
    whole = re.sub(r"`[^`]*`", lambda span: re.sub(r"\s+", "\0", span[0]), text)
    lines = textwrap.fill(whole, 90, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


if __name__ == "__main__":
    PAGE.write_text(page())
    tables.PAGE.write_text(tables.page())
    faults.PAGE.write_text(faults.page())
    for first in gains.PAGES:
        first.write_text(gains.written(first))
