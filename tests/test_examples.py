"""The demo runs, and shows what it is there to show."""

import json
import pathlib
import subprocess
import sys

import pytest


ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.slow
def test_the_language_model_trains_alike_and_sends_less(tmp_path):
    """On eight devices, densely, sparsely and by rows."""
    options = ["--steps", "3", "--json", "--plot", str(tmp_path / "demo.png")]
    run = subprocess.run(
        [sys.executable, "-m", "examples.language_model", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    assert figures["devices"] == 8
    dense, *others = (figures[name] for name in ("dense", "zen", "rows"))
    assert dense["wire_bytes"] == dense["dense_bytes"]
    for other in others:
        assert other["replicas_equal"]
        assert other["final_loss"] == pytest.approx(dense["final_loss"], rel=1e-5)
        assert other["wire_bytes"] < 0.2 * dense["wire_bytes"]
    assert (tmp_path / "demo.png").stat().st_size > 10_000
