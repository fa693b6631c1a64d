"""What takes a path works with every name that a file system takes, or refuses it in words.

Refused is only what cannot be: nothing is written then, and nothing that was there changes.
"""

import inspect
import os
import pathlib

import numpy as np
import pytest

import sparsejax
from sparsejax import __main__ as command, advise
from sparsejax.errors import ArgumentError, CheckpointError, PlanError


pytest.importorskip("orbax.checkpoint")

STATE = {"w": np.arange(3, dtype=np.float32)}
PLAN = sparsejax.Plan(
    2, (advise.LeafPlan("w", (4, 2), "float32", "row", sparsejax.schemes.AllReduce()),)
)
COST = advise.CompressionCost(1e-4, 1e-9)

# Of each kind of file: what writes it, what reads it, and what they raise.
KINDS = {
    "checkpoint": (
        lambda path: sparsejax.save(path, STATE),
        lambda path: sparsejax.restore(path, STATE)["w"].tolist() == [0, 1, 2],
        CheckpointError,
    ),
    "plan": (PLAN.save, lambda path: sparsejax.Plan.load(path) == PLAN, PlanError),
    "cost": (
        COST.save,
        lambda path: advise.CompressionCost.load(path) == COST,
        ArgumentError,
    ),
}
TAKERS = {"save", "restore", "Plan.save", "Plan.load"}
TAKERS |= {"CompressionCost.save", "CompressionCost.load"}

# What has to work, below a folder of the test.
NAMES = {
    "brackets": "lr=[0.1]",
    "brackets in a folder above": "run[1]/sweep[lr=0.1,wd=0]/100",
    "half a bracket": "a[b",
    "a question mark": "a?b#c",
    "spaces": " a b ",
    "a newline": "a\nb\tc",
    "unicode": "größe-✓",
    "a dash first": "-rf",
    "a home that is none": "~",
    "an escape": "%41%2f",
    "dots": ".hidden...",
    "a slash at the end": "a/",
    "slashes and dots": "a//./b",
    "the folder above": "full/../b",
    "a link to a folder": "link/a",
    "a long name": "x" * 219,
    "long names above": "/".join(["y" * 250] * 5) + "/a",
    "a path": pathlib.Path("a", "b"),
}
# What no kind can have, with what is wrong with it.
REFUSED = {
    "a name that is too long": "x" * 256,
    "a folder above that is too long": "x" * 256 + "/a",
    "a path that is too long": "y/" * 3000,
    "a file in the way": "file/a",
    "links in a circle": "circle/a",
    "a link to nothing": "nothing/a",
    "a folder with something": "full",
}
# What is no path at all.
NO_PATHS = {
    "nothing": "",
    "a zero": "a\0b",
    "no text": "a\udcff",
    "bytes": b"a",
    "a number": 3,
    "none": None,
    "several": ["a"],
}
# What checkpoints alone cannot have.
NO_CHECKPOINTS = {
    "too long for what save adds": "x" * 220,
    "too many bytes": "ü" * 110,
    "a backslash": "a\\b",
    "what orbax has not finished": "a.orbax-checkpoint-tmp-0",
    "what save has not finished": "a.sparsejax-next",
    "what save replaces": "a.sparsejax-last",
    "what orbax takes for a bucket": "gs:/a",
    "a bucket of somebody else": "s3://bucket/a",
    "a URL": "file:///tmp/a",
    "a question mark in a bucket": "gs://bucket/a?b",
    "the root": "/",
    "a folder that orbax takes for a bucket": "/gs/a",
    "a file": "file",
    "a link to no folder": "nothing",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder that paths begin at, with what stands in the way of some."""
    inside = tmp_path / "inside"
    (inside / "elsewhere" / "deep").mkdir(parents=True)
    (inside / "full").mkdir()
    (inside / "full" / "thesis.txt").touch()
    (inside / "file").touch()
    (inside / "link").symlink_to(inside / "elsewhere" / "deep")
    (inside / "circle").symlink_to("circle")
    (inside / "nothing").symlink_to("not there")
    monkeypatch.chdir(inside)
    return inside


def contents(folder):
    """All that is in a folder, links as links."""
    return sorted(
        os.path.join(where, name)
        for where, folders, files in os.walk(folder)
        for name in [*folders, *files]
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_file_can_be_called(folder, kind, name):
    write, reads, _ = KINDS[kind]
    path = NAMES[name]
    if kind != "checkpoint":  # which is a folder, and those above it are made with it
        path = str(path).rstrip("/")
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    write(path)
    assert reads(path)
    there = pathlib.Path(path)
    assert there.exists()
    assert not [x for x in contents(there.parent) if "-next" in x or "-tmp" in x]


def refused(call, error, path, folder):
    """Checks that a call is refused in one sentence, and changes nothing."""
    before = contents(folder)
    with pytest.raises(error) as raised:
        call(path)
    sentence = str(raised.value)
    assert sentence.endswith(".")
    assert len(sentence) < 1000
    assert contents(folder) == before
    return sentence


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", KINDS)
def test_what_it_cannot_be_called(folder, kind, name):
    write, reads, error = KINDS[kind]
    for call in (write, reads):
        refused(call, error, REFUSED[name], folder)


@pytest.mark.parametrize("name", NO_CHECKPOINTS)
def test_what_a_checkpoint_cannot_be_called(folder, name):
    write, reads, error = KINDS["checkpoint"]
    replace = lambda path: sparsejax.save(path, STATE, replace=True)
    for call in (write, replace, reads):
        sentence = refused(call, error, NO_CHECKPOINTS[name], folder)
        if name.startswith("too "):
            assert "a name of at most 219" in sentence  # and not what the system said


@pytest.mark.parametrize("name", NO_PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_path(folder, kind, name):
    write, reads, error = KINDS[kind]
    error = ArgumentError if kind == "checkpoint" else error
    for call in (write, reads):
        sentence = refused(call, error, NO_PATHS[name], folder)
        assert "path must be " in sentence
        assert repr(NO_PATHS[name]) in sentence


@pytest.mark.parametrize("program", ["explain", "doctor"])
def test_the_command_line_refuses_them_too(folder, program, capsys):
    network = ["--ranks=2", "--gbit-per-s=1", "--latency-us=1"]
    for path in [*REFUSED.values(), "a\0b", "a\udcff"]:
        assert command.main([program, f"--plan={path}", *network]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def public():
    """What the library has for its users, by name: functions, and methods of classes."""
    for module in (sparsejax, *map(sparsejax.__dict__.get, ("advise", "rows", "embrace"))):
        for name, value in inspect.getmembers(module):
            if not name.startswith("_") and inspect.isclass(value):
                for method, function in inspect.getmembers(value, inspect.isroutine):
                    yield f"{name}.{method}", function
            elif not name.startswith("_") and inspect.isfunction(value):
                yield name, value


def test_everything_that_takes_a_path_is_in_the_table():
    found = set()
    for name, function in public():
        try:
            annotations = inspect.get_annotations(function).values()
        except TypeError:  # of Python's own
            continue
        if any("PathLike" in str(one) or "pathlib" in str(one) for one in annotations):
            found.add(name)
    assert found == TAKERS
