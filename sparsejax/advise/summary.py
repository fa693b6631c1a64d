"""The traffic of a run so far, as a table to be printed."""

from typing import Any

import numpy as np

from sparsejax.advise import table
from sparsejax.monitor.metrics import metrics


_HEADING = (
    "exchanged together",
    "density",
    "of the sum",
    "sent",
    "densely",
    "share",
    "rounds",
)


def summary(state: Any) -> str:
    """Tabulates the bytes that one rank sent, in the last step and since the first one.

    A row is a bucket of leaves that were exchanged together. Its densities are those of the
    rank with the most entries, and of the sum. `densely` are the bytes that an all-reduce
    would have sent. If a sparsifier selects from several buckets together, they are
    exchanged as one: each has a share of the bytes, all have one density, and the first has
    the rounds. Nothing is computed or sent, so one of several processes may call it alone.

    Args:
        state: An optimizer state, in which transformations may be chained, masked or
            partitioned.

    Returns:
        The table as text.

    Example:
        >>> print(sparsejax.summary(state.opt_state))

    See Also:
        `sparsejax.metrics`: returns the same as numbers.
        `sparsejax.residuals`: returns the residuals of all ranks.
        `sparsejax.explain`: forecasts the same before a run.
    """
    numbers = {key: float(np.asarray(x)) for key, x in metrics(state).items()}
    prefixes = [key.split("/")[0] for key in numbers if key.endswith("/exchanges")]
    lines: list[str] = []
    for prefix in prefixes:
        lines += [*_exchange(prefix, numbers), ""]
    for key, value in numbers.items():
        where, _, what = key.partition("/")
        if what == "residual_norm":
            lines.append(f"Norm of the residuals of all ranks: {value:.4g} ({where}).")
        elif what == "skipped" and value:
            lines.append(f"Steps left out, not finite: {value:,.0f} ({where}).")
    return "\n".join(lines).rstrip()


def _exchange(prefix, numbers):
    """Returns the lines about one synchronization."""
    count = int(numbers[f"{prefix}/exchanges"])
    if not count:
        return [f"{prefix}: nothing was exchanged yet."]
    rows: list[tuple[str, ...]] = [_HEADING]
    names = [
        key.removesuffix("/density_before").removeprefix(f"{prefix}/")
        for key in numbers
        if key.startswith(f"{prefix}/") and key.endswith("/density_before")
    ]
    for name in names:
        of = lambda what, name=name: numbers[f"{prefix}/{name}/{what}"]
        rows.append(
            (
                name,
                f"{of('density_before'):.2%}",
                f"{of('density_after'):.2%}",
                *_sizes(of("wire_bytes"), of("dense_bytes")),
                f"{of('rounds'):.0f}",
            )
        )
    last = numbers[f"{prefix}/wire_bytes"], numbers[f"{prefix}/dense_bytes"]
    rows.append(("last step", "", "", *_sizes(*last), ""))
    total = numbers[f"{prefix}/total_wire_bytes"], numbers[f"{prefix}/total_dense_bytes"]
    steps = "1 exchange" if count == 1 else f"{count:,} exchanges"
    rows.append((f"all of {steps}", "", "", *_sizes(*total), ""))
    lines = table.table(rows, left={0})
    return [*lines[: len(names) + 2], lines[1], *lines[len(names) + 2 :]]


def _sizes(sent, dense):
    """Returns three cells: the bytes sent, those of an all-reduce, and their ratio."""
    share = f"{sent / dense:.1%}" if dense else ""
    return table.size(sent), table.size(dense), share
