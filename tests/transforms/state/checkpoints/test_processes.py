"""Processes that each write their own shards, and what goes on from these."""

import numpy as np
import pytest

from tests.helpers import processes


def start(*arguments):
    return processes.start("tests.transforms.state.checkpoints.worker", *arguments)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_save_and_two_or_one_go_on(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    folder, parts = tmp_path / "state", [tmp_path / f"{rank}.npz" for rank in range(2)]

    def of_two():
        address = processes.free_address()
        processes.wait([start(path, folder, 2, address, i) for i, path in enumerate(parts)])
        return [dict(np.load(path)) for path in parts]

    first = of_two()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["state"]
    again = of_two()  # processes that have not trained before
    processes.wait([start(tmp_path / "one.npz", folder, 2)])
    one = dict(np.load(tmp_path / "one.npz"))
    for rank in range(2):
        assert first[rank].keys() == again[rank].keys()
        for name, x in first[rank].items():
            assert again[rank][name].tobytes() == x.tobytes(), name
            assert one[name].tobytes() == x.tobytes(), name
    # On four ranks in one process, and on one: what was held is shared out, so the step
    # before the checkpoint counts as it did.
    for ranks in (4, 1):
        processes.wait([start(tmp_path / "other.npz", folder, ranks)])
        other = dict(np.load(tmp_path / "other.npz"))
        assert np.isfinite(other["loss"])
