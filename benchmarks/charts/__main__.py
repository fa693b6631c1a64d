"""Writes the charts of the documentation, and their numbers, from benchmarks/results.

    python -m benchmarks.charts [NAME ...]

Each is docs/pictures/charts/NAME.svg, and NAME.csv has what it shows. Nothing is measured.
"""

import sys

from benchmarks.charts import CHARTS, FOLDER
from benchmarks.charts.drawing import svg


def main(names):
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or CHARTS:
        chart = CHARTS[name]()
        (FOLDER / f"{name}.csv").write_text(chart.csv())
        (FOLDER / f"{name}.svg").write_text(svg(chart))
        print(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
