"""Processes that each write their own shards, and what goes on from these."""

import numpy as np
import pytest

from tests.helpers import processes


WORKER = "tests.checkpoints.worker"


def by_one(folder, out, ranks):
    """What one process holds that goes on from a checkpoint, or writes it first."""
    processes.wait([processes.fork(WORKER, out, folder, ranks)])
    return dict(np.load(out))


def by_two(folder, out):
    """The same, of each of two processes with a rank each."""
    address = processes.free_address()
    paths = [out / f"{rank}.npz" for rank in range(2)]
    processes.wait(
        [
            processes.start(WORKER, path, folder, 2, address, rank)
            for rank, path in enumerate(paths)
        ]
    )
    return [dict(np.load(path)) for path in paths]


def assert_same(parts, whole):
    for part in parts:
        for name, x in part.items():
            assert whole[name].tobytes() == x.tobytes(), name
    assert whole.keys() == {name for part in parts for name in part}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_save_and_two_or_one_go_on(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    folder, out = tmp_path / "run[1]" / "lr=[0.1]", tmp_path / "out"
    out.mkdir()
    first = by_two(folder, out)
    assert [path.name for path in folder.parent.iterdir()] == ["lr=[0.1]"]
    assert_same(first, by_one(folder, out / "one.npz", 2))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_go_on_from_what_one_with_four_ranks_has_saved(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    folder = tmp_path / "of four"
    four = by_one(folder, tmp_path / "four.npz", 4)
    two = by_one(folder, tmp_path / "one.npz", 2)
    assert_same(by_two(folder, tmp_path), two)
    assert np.isfinite(two["loss"])
    assert four.keys() != two.keys()
