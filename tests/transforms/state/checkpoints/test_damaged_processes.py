"""What one process cannot read is refused by all, at once, and all can go on."""

import re

import pytest

from tests.helpers import processes


WORKER = "tests.transforms.state.checkpoints.damaged_worker"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_is_damaged_for_one_process_is_refused_by_all(tmp_path):
    """Of what another process wrote: the worker's processes change places to read."""
    pytest.importorskip("orbax.checkpoint")
    address = processes.free_address()
    jobs = [processes.start(WORKER, tmp_path / "5", address, rank) for rank in (0, 1)]
    outputs = []
    try:
        for job in jobs:
            outputs.append(job.communicate(timeout=processes.TIMEOUT / 2)[0])
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert [job.returncode for job in jobs] == [0, 0], outputs
    cases = re.compile(r"^([a-z ]+(?: \d)?): (.*)$", re.M)
    first, second = (dict(cases.findall(output)) for output in outputs)
    assert first == second
    # Row 0 is read by process 1, and row 1 by process 0.
    for row, reader in ((0, 1), (1, 0)):
        for what in ("flipped", "cut off", "gone"):
            said = first.pop(f"{what} {row}")
            where = rf"CheckpointError: process {reader} on host \S+: the arrays of the "
            assert re.match(where + "checkpoint in .* cannot be read, so it is ", said)
            assert said.endswith("Take the one before.")
        assert first.pop(f"mended {row}") == "whole"
        said = first.pop(f"elsewhere {row}")
        where = rf"CheckpointError: process {row} on host \S+: there is no checkpoint in "
        assert re.match(where, said)
    assert re.match(r"CheckpointError: process 1 on \S+ ", first.pop("another tree"))
    assert first == {"at last": "whole"}
