"""The paper's analysis runs from end to end, and leaves what it says it does."""

import csv
import json

import jax
import numpy as np
import pytest


@pytest.mark.slow
def test_the_analysis_writes_every_figure_and_its_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.papers import zen_analysis

    zen_analysis.main(["--steps", "2", "--ranks", "4", "--out", str(tmp_path)])
    for number in (2, 3, 8, 15):
        stem = tmp_path / f"zen-figure{number}-jax{jax.__version__}"
        assert stem.with_name(stem.name + ".png").stat().st_size > 10_000
        with open(stem.with_name(stem.name + ".csv")) as file:
            assert len(list(csv.reader(file))) > 5
    lines = (tmp_path / f"zen-jax{jax.__version__}.jsonl").read_text().splitlines()
    head, *rows = map(json.loads, lines)
    assert head["command"].startswith("python -m benchmarks.papers.zen_analysis --steps 2")
    schemes = [row["times"] for row in rows if "times" in row]
    assert all(times["all-reduce"] == [1.0, 1.0] for times in schemes)
    # On two ranks sparse beats dense, and indices double what Balanced Parallelism sends.
    for row in rows:
        if row.get("unit") == "element":
            found = row["times"]
            assert found["Zen"][0] < 0.2
            bare = np.array(found["Balanced Parallelism without index"])
            np.testing.assert_allclose(found["Balanced Parallelism"], 2 * bare)
