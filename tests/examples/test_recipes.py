"""Every recipe is short, runs as it stands, and trains: the losses that it prints fall."""

import os
import pathlib
import re
import subprocess
import sys
import threading

import pytest


ROOT = pathlib.Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "examples" / "recipes").glob("[!_]*.py"))
TIMEOUT = 300  # seconds

# Imports what all recipes do, and runs each in a process of its own, in which no backend of
# JAX has been started. Says with which status it has ended.
FORKS = """
import os, runpy, sys
import flax.linen, flax.nnx, jax, optax, sparsejax
for line in sys.stdin:
    recipe, folder = line.split()
    if not (child := os.fork()):
        os.chdir(folder)
        printed = os.open("printed.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        runpy.run_module(f"examples.recipes.{recipe}", run_name="__main__", alter_sys=True)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def forks():
    """A process that runs recipes, whose names and folders it reads line by line."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment["PYTHONPATH"] = str(ROOT)
    environment["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # as in all tests, for speed
    started = subprocess.Popen(
        [sys.executable, "-c", FORKS],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with started:
        yield started
        started.stdin.close()


def run(forks, recipe, folder):
    """What a recipe prints, run in a folder of its own, in which it may leave files."""
    timer = threading.Timer(TIMEOUT, os.killpg, (forks.pid, 9))
    timer.start()
    try:
        forks.stdin.write(f"{recipe} {folder}\n")
        forks.stdin.flush()
        status = forks.stdout.readline()
    finally:
        timer.cancel()
    printed = (folder / "printed.txt").read_text()
    assert status == "0\n", printed
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_and_its_loss_falls(forks, recipe, tmp_path):
    printed = run(forks, recipe, tmp_path)
    losses = [float(loss) for loss in re.findall(r"\bloss:? ([0-9.]+)", printed)]
    assert len(losses) > 1, printed
    assert losses[-1] < losses[0], printed


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_at_most_40_lines(recipe):
    path = ROOT / "examples" / "recipes" / f"{recipe}.py"
    assert len(path.read_text().splitlines()) <= 40
