"""The demo runs, and shows what it is there to show."""

import json
import pathlib
import subprocess
import sys

import pytest


ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.slow
def test_the_language_model_trains_alike_and_sends_less(tmp_path):
    options = [
        "--steps",
        "3",
        "--devices",
        "2",
        "--json",
        "--plot",
        str(tmp_path / "demo.png"),
    ]
    run = subprocess.run(
        [sys.executable, "-m", "examples.language_model", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    text = json.dumps(figures)
    assert "loss" in text
    assert (tmp_path / "demo.png").stat().st_size > 10_000
