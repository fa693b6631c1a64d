"""One of two processes of which one reads what is damaged, of what the other has written.

    python -m tests.checkpoints.damaged_worker FOLDER COORDINATOR RANK

Each writes a shard. Then the devices change places: process 1 reads what process 0 wrote,
and the other way round. Then one of them cannot write, or what it has written is damaged
before it is read back. Of each case a line says what it is, and what was raised, or that
the numbers are those that were saved.
"""

import contextlib
import pathlib
import random
import resource
import sys

import jax

from tests.helpers import processes


def main(folder, coordinator, rank):
    processes.take_part(2, 2, coordinator, rank)
    # After the backend is settled: these make arrays.
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from orbax.checkpoint._src.multihost import multihost

    import sparsejax
    from sparsejax.checkpoints import storage, writing
    from sparsejax.errors import ArgumentError, CheckpointError
    from sparsejax.jobs import store
    from tests.checkpoints.test_damaged import files, flipped, instead

    def laid(numbers, devices):
        """An array with a row on each device, in this order."""
        mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
        there = NamedSharding(mesh, P("data"))
        return jax.make_array_from_callback((2, 300), there, lambda at: numbers[at])

    # Numbers that no compressor makes shorter: on disk they stand as they are.
    numbers = np.random.default_rng(0).integers(0, 2**32, (2, 300), np.uint32)
    devices, folder = jax.devices(), pathlib.Path(folder)
    sparsejax.save(folder, {"w": laid(numbers, devices)})
    like = {"w": laid(0 * numbers, devices[::-1])}

    def together():
        store.of_all("that it is there", "", 60)

    def told(case, path=folder, like=like, do=None):
        together()
        try:
            if do is not None:
                do()
            restored = sparsejax.restore(path, like)["w"].addressable_shards[0]
        except (ArgumentError, CheckpointError) as error:
            outcome = f"{type(error).__name__}: {error}"
        else:
            assert np.array_equal(restored.data, numbers[restored.index])
            outcome = "whole"
        together()
        print(f"{case}: {outcome}", flush=True)

    def save(most=-1):
        """Saves something else, as on a disk that has room for so many bytes of a file."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, -1))
        try:
            sparsejax.save(folder, {"w": laid(numbers + 1, devices)}, replace=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))

    def save_damaged(row):
        """Saves something else, of which a row is damaged before any process reads it."""
        write = writing.write

        def written(folder, about, arrays):
            write(folder, about, arrays)
            together()
            if rank == 0:
                shard = (numbers + 1)[row].tobytes()
                (file,) = [file for file in files(folder) if shard in file.read_bytes()]
                content = file.read_bytes()
                file.write_bytes(flipped(content, 8 * content.index(shard) + 5))
            together()

        writing.write = written
        try:
            save()
        finally:
            writing.write = write

    record = storage.folders.record

    def unseen(folder):
        """As on a host that does not see what process 0 has written."""
        return record(folder.parent / "elsewhere")

    random.seed(5)
    for row, what in ((0, "flipped"), (1, "gone")):
        shard = numbers[row].tobytes()
        (file,) = [file for file in files(folder) if shard in file.read_bytes()]
        content = file.read_bytes()
        bit = 8 * content.index(shard) + random.randrange(8 * len(shard))
        left = flipped(content, bit) if what == "flipped" else None
        # Neither reads before it is so, nor is it mended before both have read.
        together()
        with instead(file, left) if rank == 0 else contextlib.nullcontext():
            told(f"{what} {row}")
        told(f"mended {row}")
    for other in (0, 1):
        told(f"elsewhere {other}", folder.parent / "none" if rank == other else folder)
    newer = folder.parent / "6"
    sparsejax.save(newer, {"w": laid(numbers, devices)})
    told("another checkpoint 6", newer if rank == 1 else folder)
    told("another path", do=lambda: sparsejax.save(folder.parent / f"of {rank}", {}))
    told("whose number 1", do=lambda: sparsejax.save(newer, {}, about={"rank": rank}))
    own = {"w": laid(numbers, devices), "loader": {"key": jax.random.key(rank), "at": 3}}
    told("whose key 1", do=lambda: sparsejax.save(folder.parent / "7", own))
    wrong = {"w": laid(0 * numbers, devices), "more": 1}
    told("another tree", like=wrong if rank == 1 else like)
    # orbax waits five minutes for one that does not come.
    multihost._DEFAULT_BARRIER_TIMEOUT = 5
    for full in (0, 1):
        told(f"full {full}", do=lambda full=full: save(600 if rank == full else -1))
        told(f"kept {full}")
    for row in (0, 1):
        told(f"damaged {row}", do=lambda row=row: save_damaged(row))
        told(f"after it {row}")
    storage._SEEN = 1.0
    if rank == 1:
        storage.folders.record = unseen
    told("unseen 1", do=save)
    storage.folders.record = record
    told("at last")


if __name__ == "__main__":
    folder, coordinator, rank = sys.argv[1:]
    main(folder, coordinator, int(rank))
