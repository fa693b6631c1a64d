"""What a chart shows: its numbers, by panel and series, and the result files they are from.

Nothing here draws. A page that quotes a number takes it from the same place as its chart.
"""

import csv
import dataclasses
import hashlib
import io
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.harness import results


class Point(NamedTuple):
    """One number of a chart.

    Attributes:
        at: Where it stands: a number, or the name of a category.
        value: The number.
        low: The least of what was measured, if it is shown.
        high: The largest.
    """

    at: float | str
    value: float
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Series:
    """Points with one name in the legend.

    Attributes:
        label: The name.
        points: The points.
        dashed: Whether a line is dashed, or a bar pale: what is compared with.
        color: A number for its color, if that is not its place among the labels.
    """

    label: str
    points: tuple[Point, ...]
    dashed: bool = False
    color: int | None = None


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: What stands above.
        series: What is shown.
        value: What the numbers are, with their unit.
        at: What the places are, where they are numbers.
        kind: "lines", "bars" or "dots"; the last two have categories from the top down.
        log: Which axes are logarithmic: "", "at", "value" or "both".
        mark: A number at which a line is drawn: as fast as what is compared with.
    """

    title: str
    series: tuple[Series, ...]
    value: str
    at: str = ""
    kind: str = "lines"
    log: str = ""
    mark: float | None = None


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        name: Of its files.
        says: What it shows, for readers who do not see it.
        panels: From left to right.
        files: The result files that it is made of.
        height: In inches.
        widths: How wide the panels are, as shares.
    """

    name: str
    says: str
    panels: tuple[Panel, ...]
    files: tuple[results.Results, ...]
    height: float = 3.0
    widths: tuple[float, ...] = ()

    def csv(self) -> str:
        """Its numbers, a line each."""
        lines = io.StringIO()
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["panel", "series", *Point._fields])
        for panel in self.panels:
            for series in panel.series:
                for point in series.points:
                    cells = [_cell(x) for x in point]
                    writer.writerow([panel.title, series.label, *cells])
        return lines.getvalue()

    def digest(self) -> str:
        """Changes with everything that is drawn."""
        return hashlib.sha256(repr((self.says, self.panels)).encode()).hexdigest()[:16]

    def points(self, label: str, panel: int = 0) -> dict[float | str, Point]:
        """The points of a series by where they stand."""
        found = [s.points for s in self.panels[panel].series if s.label == label]
        assert found, (self.name, label)
        return {point.at: point for points in found for point in points}

    def value(self, label: str, at: float | str, panel: int = 0) -> float:
        """One number that is drawn."""
        return self.points(label, panel)[at].value


def _cell(x: float | str | None) -> str:
    if isinstance(x, float):
        return f"{x:.6g}"
    return "" if x is None else str(x).replace("\n", " ")


def series(
    label: str, points: Iterable[tuple], dashed: bool = False, color: int | None = None
) -> Series:
    """A series of points: (at, value) or (at, value, low, high)."""
    return Series(label, tuple(Point(*p) for p in points), dashed, color)


def spread(at: float | str, values: Iterable[float]) -> Point:
    """The median of values, from the least to the largest."""
    values = [*values]
    return Point(at, statistics.median(values), min(values), max(values))


def mbit(rate: str) -> int:
    """Mbit/s of a rate as records name it: "250mbit", "1gbit"."""
    if rate.endswith("gbit"):
        return 1000 * int(rate.removesuffix("gbit"))
    return int(rate.removesuffix("mbit"))


def named(rate: str) -> str:
    """A rate as pages write it."""
    number = mbit(rate)
    return f"{number / 1000:g} Gbit/s" if number >= 1000 else f"{number} Mbit/s"
