"""Figures, and CSV files of their data."""

import csv
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.harness import record


def panels(
    down: int = 1, across: int = 1, size: tuple[float, float] = (4.5, 3.5), **options: Any
) -> tuple[Figure, np.ndarray]:
    """Returns a figure and its axes, [down, across]; `size` is of each panel, in inches."""
    both = (size[0] * across, size[1] * down)
    figure = Figure(figsize=both, layout="constrained")
    return figure, figure.subplots(down, across, squeeze=False, **options)


def save(
    name: str,
    rows: Sequence[dict] = (),
    figure: Figure | None = None,
    folder: pathlib.Path | None = None,
    part: str = "",
) -> None:
    """Writes rows as CSV, and a figure as PNG, each if given.

    Args:
        name: The name of the files, to which the version of JAX is appended.
        rows: The rows; all have the same fields, in the order of the columns.
        figure: The figure.
        folder: The folder of the files, instead of benchmarks/results.
        part: A suffix of their names.
    """
    ending = f"-{part}" if part else ""
    if rows:
        path = record.path_of(name, f"{ending}.csv", folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as lines:
            writer = csv.DictWriter(lines, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    if figure is not None:
        path = record.path_of(name, f"{ending}.png", folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
