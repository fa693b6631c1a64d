"""Checkpoints that earlier versions wrote are read for ever.

    python -m tests.transforms.state.checkpoints.test_formats

writes the states of `cases` that are not there yet, in the format that there is now, into a
folder of its own under tests/golden/checkpoints. What is there stays as it is.
"""

import pathlib
import shutil
import tempfile

import jax
import numpy as np
import pytest

import sparsejax
from sparsejax.transforms.state.checkpoints import records
from tests import helpers
from tests.transforms.state.checkpoints import cases


GOLDEN = pathlib.Path(__file__).parents[3] / "golden" / "checkpoints"
FOLDERS = sorted(GOLDEN.glob("format-*/*"))
NAMES = {name.replace(" ", "_"): name for name in cases.CASES}


# What orbax writes and does not read: where it was written, and the parts of each process.
_UNREAD = ("commit_success.txt", "ocdbt.process_*", "_sharding")


def write():
    for folder, name in NAMES.items():
        there = GOLDEN / f"format-{records.FORMAT}" / folder
        if there.exists():
            continue
        with tempfile.TemporaryDirectory() as path:
            saved = pathlib.Path(path, "saved")
            sparsejax.save(saved, cases.filled(name))
            shutil.copytree(saved, there, ignore=shutil.ignore_patterns(*_UNREAD))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: "/".join(path.parts[-2:]))
def test_a_checkpoint_of_an_earlier_version_is_read(folder):
    """On as many ranks, and on others."""
    pytest.importorskip("orbax.checkpoint")
    name = NAMES[folder.name]
    restored = sparsejax.restore(folder, cases.like(name))
    assert helpers.octets(restored) == helpers.octets(cases.filled(name))
    moved = sparsejax.restore(folder, cases.like(name, 4))
    held = cases.held(moved)
    for path, x in cases.held(cases.filled(name)).items():
        np.testing.assert_allclose(held[path], x, rtol=1e-5, atol=1e-6, err_msg=path)


def test_there_is_a_folder_for_every_format_and_state():
    assert [path.name for path in sorted(GOLDEN.iterdir())] == [
        f"format-{number}" for number in range(1, records.FORMAT + 1)
    ]
    now = f"format-{records.FORMAT}"
    assert {path.name for path in FOLDERS if path.parent.name == now} == {*NAMES}
    assert set(records.UPGRADES) == set(range(1, records.FORMAT))
    size = sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file())
    assert size < 100_000 * records.FORMAT


def test_an_older_format_is_brought_to_this_one(tmp_path, monkeypatch):
    """By the functions of the table, one after another, before it is checked."""
    pytest.importorskip("orbax.checkpoint")
    state = {"w": np.arange(3.0), "gone": np.zeros(2)}
    sparsejax.save(tmp_path / "old", state)

    def renamed(given):
        parts = given["tree"]["parts"]
        parts = {"weights": parts["w"], "new": {"value": 0}}
        return given | {"tree": given["tree"] | {"parts": parts}}

    def moved(given):
        return given | {"tree": {"type": "tuple", "parts": {"0": given["tree"]}}}

    now = records.FORMAT
    monkeypatch.setattr(records, "FORMAT", now + 2)
    monkeypatch.setattr(records, "UPGRADES", {now: renamed, now + 1: moved})
    like = ({"weights": np.zeros(3), "new": 5},)
    (restored,) = sparsejax.restore(tmp_path / "old", like)
    assert restored["weights"].tolist() == [0, 1, 2]
    assert restored["new"] == 0

    monkeypatch.setattr(records, "UPGRADES", {now: lambda given: given["no such key"]})
    with pytest.raises(sparsejax.errors.CheckpointError, match="is damaged: it has format"):
        sparsejax.restore(tmp_path / "old", like)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    write()
