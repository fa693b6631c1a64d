"""Charts of the documentation are made of the committed results, and no figure is typed."""

import ast
import re
import statistics

import pytest

from benchmarks import charts
from benchmarks.harness import results
from tests import helpers
from tests.test_readme import PAGES, ROOT


TOPICS = sorted((ROOT / "docs" / "topics").glob("*.py"))


@pytest.fixture(scope="module")
def made():
    """All charts, by name."""
    return {name: make() for name, make in charts.CHARTS.items()}


def test_numbers_beside_the_charts_are_those_of_the_results(made):
    """`python -m benchmarks.charts` writes what is there."""
    found = {path.stem: path.read_text() for path in charts.FOLDER.glob("*.csv")}
    assert found == {name: chart.csv() for name, chart in made.items()}


def test_charts_show_the_numbers_of_the_results(made):
    """Each is drawn by a digest of all that it shows."""
    drawn = {path.stem: path.read_text() for path in charts.FOLDER.glob("*.svg")}
    assert drawn.keys() == made.keys()
    for name, text in drawn.items():
        assert f"<dc:identifier>{made[name].digest()}</dc:identifier>" in text, name
        assert "<dc:date>" not in text


def test_every_chart_is_on_a_page(made):
    text = "\n".join(PAGES.values())
    for name, chart in made.items():
        assert f"![{chart.says}](pictures/charts/{name}.svg)" in text


def medians(name, **of):
    """The median seconds of rows with these values, by scheme, read without a chart."""
    rows = results.read(name).where(**of)
    return {row["scheme"]: statistics.median(row["seconds"]) for row in rows}


def test_points_are_what_the_records_say(made):
    """Some of each kind, computed here once more."""
    of = {"workload": "lstm", "hosts": 16, "rate": "1gbit"}
    ms = medians("communication-jax0.10.2", **of)
    assert made["sums"].value("16 hosts", 1000, 1) == ms["psum"] / ms["zen"]
    assert made["sums"].value("16 hosts", 1000, 1) == pytest.approx(2.8, abs=0.05)
    ms = medians("end-to-end-jax0.10.2", about="10,000,000 rows, zipf ids")
    at = "clicks, 10,000,000 rows,\n4 hosts"
    assert made["rows"].value("zen_sync, lazy", at) == ms["dense"] / ms["rows"]
    of = {"model": "decoder", "rate": "250mbit", "scheme": "jit, sparse"}
    row = results.read("in-jit-network-jax0.10.2").one(**of)
    point = made["in_jit"].points("jit", 1)[250]
    assert point.value == statistics.median(row["times_dense"])
    assert (point.low, point.high) == (min(row["times_dense"]), max(row["times_dense"]))
    row = results.read("first_step-jax0.10.2").one(model="dlrm", sum="embrace")
    label = "click model, 26 tables"
    assert made["compiling"].value(label, "embrace") == row["ratio"]
    assert made["compiling"].value("goal of both", "embrace") < row["ratio"] / 6


# --- Drawing.


@pytest.fixture
def drawing():
    pytest.importorskip("matplotlib")
    from benchmarks.charts import drawing

    return drawing


@pytest.mark.parametrize("name", ["gains", *helpers.slow("sums")])
def test_a_chart_is_the_same_bytes_again(made, drawing, name):
    import matplotlib

    text = drawing.svg(made[name])
    assert text == drawing.svg(made[name])
    drawn = (charts.FOLDER / f"{name}.svg").read_text()
    version = re.search(r"Matplotlib v([\w.]+)", drawn)[1]
    if version == matplotlib.__version__:
        assert text == drawn


def test_what_is_drawn_are_the_points(made, drawing):
    figure = drawing.drawn(made["sums"])
    for axis, panel in zip(figure.axes, made["sums"].panels, strict=True):
        lines = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
        for series in panel.series:
            assert lines[series.label] == [[p.at, p.value] for p in series.points]
    bars = drawing.drawn(made["gains"]).axes[0].patches
    values = {p.value for series in made["gains"].panels[0].series for p in series.points}
    assert {bar.get_width() for bar in bars} == values


# --- Texts.


def typed(source):
    """The digits that stand in the texts of a script, but not in names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            if getattr(target, "id", "") in ("text", "conditions"):
                parts = getattr(node.value, "values", [node.value])
                said = [x.value for x in parts if isinstance(x, ast.Constant)]
                bare = re.sub(
                    r"float64|Float32|\(performance_tables.md#[\w-]+\)", "", str(said)
                )
                yield from re.findall(r".{0,20}\d+.{0,20}", bare)


@pytest.mark.parametrize("path", TOPICS, ids=lambda path: path.stem)
def test_no_figure_of_a_text_is_typed(path):
    assert [*typed(path.read_text())] == []


def test_a_typed_figure_is_seen():
    assert len([*typed('text = f"""It is {x} times as fast, and sends 3 MB."""')]) == 1
    assert [*typed('text = f"""It is {f(3)} times as fast, against float64."""')] == []
