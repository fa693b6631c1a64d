"""What one process cannot read or write is refused by all, and all can go on."""

import re

import pytest

from tests.helpers import processes
from tests.helpers.processes import outputs


WORKER = "tests.checkpoints.damaged_worker"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_is_damaged_for_one_process_is_refused_by_all(tmp_path):
    """Of what another process wrote: the worker's processes change places to read."""
    pytest.importorskip("orbax.checkpoint")
    address = processes.free_address()
    folder = tmp_path / "lr=[0.1]" / "5"
    jobs = [processes.fork(WORKER, folder, address, rank) for rank in (0, 1)]
    told = outputs(jobs)
    assert [job.returncode for job in jobs] == [0, 0], told
    cases = re.compile(r"^([a-z ]+ \d|another tree|another path|at last): (.*)$", re.M)
    first, second = (dict(cases.findall(output)) for output in told)
    alike = lambda cases: {k: v for k, v in cases.items() if not k.startswith("full")}
    assert alike(first) == alike(second)
    # Row 0 is read by process 1, and row 1 by process 0.
    for row, reader, what in ((0, 1, "flipped"), (1, 0, "gone")):
        said = first.pop(f"{what} {row}")
        where = rf"CheckpointError: process {reader} on host \S+: the arrays of the "
        assert re.match(where + "checkpoint in .* cannot be read, so it is ", said)
        assert "Take the one before. See errors" in said
        assert first.pop(f"mended {row}") == "whole"
        said = first.pop(f"elsewhere {row}")
        where = rf"CheckpointError: process {row} on host \S+: there is no checkpoint in "
        assert re.match(where, said)
    assert re.match(r"CheckpointError: process 1 on \S+ ", first.pop("another tree"))
    # Of equal numbers, too: what differs is which checkpoint it is.
    differ = "CheckpointError: {} differs between processes: on host .* it is {}, and on "
    said = first.pop("another checkpoint 6")
    assert re.match(
        differ.format("the checkpoint to restore", r".*/5 \(of hash \w+\)"), said
    )
    assert re.search(r"\(process 1\) .*/6 \(of hash \w+\)\. Give all processes the ", said)
    said = first.pop("another path")
    assert re.match(differ.format("the path", ".*/of 0"), said)
    assert re.search(r"\(process 1\) .*/of 1\. All processes write their parts ", said)
    said = first.pop("whose number 1")
    assert re.match(differ.format("about=", "{'rank': 0}"), said)
    # Process 0 writes a key of its own: that of the other would be lost.
    said = first.pop("whose key 1")
    assert re.match(differ.format("the leaf 'loader/key'", r"key<fry>.* of hash \w+"), said)
    kept = "CheckpointError: the checkpoint could not be written to .*, and the one before"
    for full in (0, 1):
        # Each process says why; one that waited for the other, that this one could not.
        for rank, said in enumerate((first, second)):
            who = "" if rank == full else rf"process {full} on host \S+: "
            assert re.match(rf"{kept} is kept: {who}\w+: ", said.pop(f"full {full}"))
        assert first.pop(f"kept {full}") == "whole"
    # Each reads back what it has written, and what one cannot read gets no name.
    unseen = "what was written is not there: .* all need the same path"
    assert re.match(
        rf"{kept} is kept: process 1 on host \S+: {unseen}", first.pop("unseen 1")
    )
    for row in (0, 1):
        said = first.pop(f"damaged {row}")
        why = "what was written cannot be read back at 'w': "
        assert re.match(rf"{kept} is kept: process {row} on host \S+: {why}", said)
        assert first.pop(f"after it {row}") == "whole"
    assert first == {"at last": "whole"}
    assert sorted(path.name for path in folder.parent.iterdir()) == ["5", "6"]
