"""Every recipe is short, runs as it stands, and trains: the losses that it prints fall."""

import os
import pathlib
import re
import subprocess
import sys

import pytest


ROOT = pathlib.Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "examples" / "recipes").glob("[!_]*.py"))


def run(recipe, folder):
    """What a recipe prints, run in a folder of its own, in which it may leave files."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-m", f"examples.recipes.{recipe}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_and_its_loss_falls(recipe, tmp_path):
    printed = run(recipe, tmp_path)
    losses = [float(loss) for loss in re.findall(r"\bloss:? ([0-9.]+)", printed)]
    assert len(losses) > 1, printed
    assert losses[-1] < losses[0], printed


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_at_most_40_lines(recipe):
    path = ROOT / "examples" / "recipes" / f"{recipe}.py"
    assert len(path.read_text().splitlines()) <= 40
