"""Draws charts as SVG: the same bytes each time, with the same version of matplotlib.

Each is a light card with its own background, as the pictures are, so that it reads on dark
pages. Letters are outlines, so that a browser's fonts change nothing.
"""

import io
import itertools
import math

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.charts.chart import Chart, Panel, Series


WIDTH = 7.8
INK, LINE, CARD, PALE = "#22272e", "#9aa4b2", "#fbfcfe", "#e4e8ee"
# Colors that color-blind eyes tell from one another.
CYCLE = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"),
    *("#56b4e9", "#6b4c9a", "#7a5230", "#22272e", "#9aa4b2"),
)
MARKERS = "osD^vPX<>*"
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": LINE,
    "axes.facecolor": CARD,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "figure.facecolor": CARD,
    "font.size": 8,
    "grid.color": PALE,
    "grid.linewidth": 0.7,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "savefig.facecolor": CARD,
    "svg.fonttype": "path",
    "svg.hashsalt": "sparsejax",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def drawn(chart: Chart) -> Figure:
    """The figure of a chart."""
    with _style():
        figure = Figure(figsize=(WIDTH, chart.height), layout="constrained")
        count = len(chart.panels)
        (axes,) = figure.subplots(
            1, count, squeeze=False, width_ratios=chart.widths or (1,) * count
        )
        for axis, panel in zip(axes, chart.panels, strict=True):
            KINDS[panel.kind](axis, panel)
            axis.set_title(panel.title)
        _name_panels_once(axes, chart.panels)
        _legends(figure, axes, chart.panels)
        return figure


def svg(chart: Chart) -> str:
    """A chart as SVG, with the digest of what it shows, and without a date."""
    with _style():
        text = io.StringIO()
        about = {"Date": None, "Identifier": chart.digest(), "Title": chart.says}
        drawn(chart).savefig(text, format="svg", metadata=about)
        # An editor would take off what is at the ends of lines.
        return "\n".join(line.rstrip() for line in text.getvalue().split("\n"))


class _style:
    """Matplotlib's own defaults, whatever this user has set, and ours."""

    def __enter__(self):
        self._context = matplotlib.rc_context()
        self._context.__enter__()
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)

    def __exit__(self, *error):
        return self._context.__exit__(*error)


# --- One panel.


def _lines(axis, panel):
    for number, (label, parts) in enumerate(_by_label(panel).items()):
        for place, part in enumerate(parts):
            at, value = zip(*((p.at, p.value) for p in part.points), strict=True)
            few = len(at) <= 12
            look = {
                "color": _color(part, number),
                "linestyle": "--" if part.dashed else "-",
                "marker": MARKERS[number % len(MARKERS)] if few else "",
                "label": "" if place else label,
                "alpha": 0.85 if part.dashed else 1,
            }
            axis.plot(at, value, **look)
            _ranges(axis, [(p.at, p) for p in part.points], look["color"], upright=True)
    axis.set(xlabel=panel.at, ylabel=panel.value)
    places = sorted({p.at for part in panel.series for p in part.points})
    if panel.log in ("both", "at"):
        _logarithmic(axis.xaxis, places if len(places) <= 6 else None)
    if panel.log in ("both", "value"):
        _logarithmic(axis.yaxis)
    if panel.mark is not None:
        axis.axhline(panel.mark, color=LINE, linewidth=1)


def _bars(axis, panel):
    names, count = _categories(panel), len(panel.series)
    thick = 0.8 / count
    for number, part in enumerate(panel.series):
        for p in part.points:
            y = names.index(p.at) + (number - (count - 1) / 2) * thick
            color = _color(part, number)
            axis.barh(
                y,
                p.value,
                height=0.9 * thick,
                color=color,
                alpha=0.45 if part.dashed else 1,
                label=part.label if p is part.points[0] else "",
            )
            right = max(p.value, p.high or 0)
            axis.annotate(
                f"{p.value:.1f}" if 1 <= p.value < 9.95 else short(p.value),
                (right, y),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=6.5,
            )
            _ranges(axis, [(y, p)], INK, upright=False)
    axis.margins(x=0.12)
    _sideways(axis, panel, names)


def _dots(axis, panel):
    names, count = _categories(panel), len(panel.series)
    for number, part in enumerate(panel.series):
        shift = (number - (count - 1) / 2) * min(0.12, 0.5 / count)
        places = [(names.index(p.at) + shift, p) for p in part.points]
        axis.plot(
            [p.value for _, p in places],
            [y for y, _ in places],
            linestyle="",
            marker="|" if part.dashed else MARKERS[number % len(MARKERS)],
            markersize=9 if part.dashed else 4,
            color=INK if part.dashed else _color(part, number),
            label=part.label,
        )
        _ranges(axis, places, _color(part, number), upright=False)
    axis.margins(x=0.06)
    _sideways(axis, panel, names)


KINDS = {"lines": _lines, "bars": _bars, "dots": _dots}


def _sideways(axis, panel, names):
    """Axes whose categories stand from the top down."""
    axis.set_yticks(range(len(names)), names, fontsize=7.5)
    axis.set_ylim(len(names) - 0.45, -0.55)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(panel.value)
    if panel.log == "value":
        _logarithmic(axis.xaxis)
    if panel.mark is not None:
        axis.axvline(panel.mark, color=LINE, linewidth=1, zorder=0.5)


def _ranges(axis, places, color, upright):
    """From the least to the largest of each point that has both."""
    for at, p in places:
        if p.low is not None:
            draw = axis.vlines if upright else axis.hlines
            draw(at, p.low, p.high, color=color, linewidth=1)


def _logarithmic(axis, places=None):
    """A logarithmic axis, whose ticks are plain numbers."""
    name = axis.axis_name
    getattr(axis.axes, f"set_{name}scale")("log")
    if places is not None:
        axis.set_ticks(places, [short(place) for place in places])
    else:
        low, high = axis.get_view_interval()
        decades = math.log10(high / low)
        subs = (1, 2, 5) if decades < 1.9 else (1, 3) if decades < 3 else (1,)
        axis.set_major_locator(LogLocator(subs=subs, numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda x, _: short(x)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


# --- The whole figure.


def _name_panels_once(axes, panels):
    """Names of categories stand at the first of panels that have the same."""
    pairs = zip(itertools.pairwise(axes), itertools.pairwise(panels), strict=True)
    for (before, axis), (first, panel) in pairs:
        both = {first.kind, panel.kind}
        if both <= {"bars", "dots"} and _categories(first) == _categories(panel):
            axis.sharey(before)
            axis.tick_params(labelleft=False)


def _legends(figure, axes, panels):
    """One legend above, where all panels have the same series, or one below each."""
    names = [tuple(_by_label(panel)) for panel in panels]
    if len(set(names)) == 1:
        handles, labels = axes[0].get_legend_handles_labels()
        columns = min(5, len(labels))
        figure.legend(handles, labels, loc="outside upper center", ncols=columns)
        return
    tall = figure.get_size_inches()[1]
    for axis, found in zip(axes, names, strict=True):
        wide = max(map(len, found)) > 18 or len(found) == 4
        below = (0.5, -0.5 / (tall - 1))
        columns = 2 if wide else 3
        axis.legend(loc="upper center", bbox_to_anchor=below, ncols=columns)


def _by_label(panel: Panel) -> dict[str, list[Series]]:
    found = {}
    for part in panel.series:
        found.setdefault(part.label, []).append(part)
    return found


def _categories(panel):
    return [*dict.fromkeys(p.at for part in panel.series for p in part.points)]


def _color(part, number):
    return CYCLE[(number if part.color is None else part.color) % len(CYCLE)]


def short(value: float) -> str:
    """A number to two digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 9.95 else f"{value:.2g}"
