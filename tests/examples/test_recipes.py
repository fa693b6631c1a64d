"""Every recipe is short, runs as it stands, and trains: the losses that it prints fall."""

import re

import pytest

from tests.helpers import processes
from tests.helpers.processes import outputs


FOLDER = processes.ROOT / "examples" / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))


def run(recipe, folder):
    """What a recipe prints, run in a folder of its own, in which it may leave files."""
    process = processes.fork(f"examples.recipes.{recipe}", folder=folder)
    (printed,) = outputs([process])
    assert process.returncode == 0, printed
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_and_its_loss_falls(recipe, tmp_path):
    printed = run(recipe, tmp_path)
    losses = [float(loss) for loss in re.findall(r"\bloss:? ([0-9.]+)", printed)]
    assert len(losses) > 1, printed
    assert losses[-1] < losses[0], printed


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_at_most_40_lines(recipe):
    path = FOLDER / f"{recipe}.py"
    assert len(path.read_text().splitlines()) <= 40
