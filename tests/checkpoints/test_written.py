"""What was written is read back before it gets its name, and before anything is removed."""

import collections
import concurrent.futures
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from sparsejax.checkpoints import chunks, folders, reading, records, storage, writing
from sparsejax.errors import ArgumentError, CheckpointError
from tests import helpers
from tests.checkpoints.cases import LIKE, STATE, refused
from tests.checkpoints.test_damaged import files, flipped


pytest.importorskip("orbax.checkpoint")

NEW = STATE | {"w": STATE["w"] + 1}


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "run[1]" / "lr=[0.1]"
    sparsejax.save(path, STATE)
    return path


@pytest.fixture
def damaging(monkeypatch):
    """Has something happen to what orbax wrote, before sparsejax looks at it."""
    write = writing.write

    def set_up(damage):
        def written(folder, about, arrays):
            write(folder, about, arrays)
            damage(folder)

        monkeypatch.setattr(writing, "write", written)

    return set_up


def fails(path, replace, match="what was written cannot be read back"):
    """Checks that a save raises, and leaves what was there, or nothing."""
    kept = "the one before is kept" if replace else "nothing of it is kept"
    names = sorted(entry.name for entry in path.parent.iterdir())
    sentence = refused(f"could not be written to .*, and {kept}: {match}",
                       sparsejax.save, path, NEW, replace=replace)  # fmt: skip
    assert str(path) in sentence
    assert sorted(entry.name for entry in path.parent.iterdir()) == names
    if replace:
        np.testing.assert_array_equal(sparsejax.restore(path, LIKE)["w"], STATE["w"])


@pytest.mark.parametrize("replace", [False, True])
def test_a_write_without_arrays_is_no_checkpoint(saved, monkeypatch, replace):
    """orbax merges what processes wrote, and returns where it finds nothing to merge."""
    from orbax.checkpoint._src.serialization import ocdbt_utils

    async def nothing(*_, **__):
        pass

    path = saved if replace else saved.parent / "4"
    monkeypatch.setattr(ocdbt_utils, "merge_ocdbt_per_process_files", nothing)
    fails(path, replace, r"what was written cannot be read back at 'w': .*does not exist")
    monkeypatch.undo()
    sparsejax.save(path, NEW, replace=replace)
    np.testing.assert_array_equal(sparsejax.restore(path, LIKE)["w"], NEW["w"])


@pytest.mark.parametrize("what", ["gone", "flipped"])
def test_no_file_can_be_damaged_before_it_has_its_name(saved, damaging, what):
    """Each file that is there: `save` raises, or what comes back is what was saved."""
    outcomes = collections.Counter()
    for number in range(len(files(saved))):

        def damage(folder, number=number):
            file = files(folder)[number]
            content = file.read_bytes()
            file.unlink()
            if what == "flipped":
                file.write_bytes(flipped(content, 4 * len(content)) if content else b"")

        damaging(damage)
        path = saved.parent / str(number)
        try:
            sparsejax.save(path, NEW)
        except CheckpointError:
            fails(path, False, "")
            fails(saved, True, "")
            outcomes["raised"] += 1
            continue
        np.testing.assert_array_equal(sparsejax.restore(path, LIKE)["w"], NEW["w"])
        outcomes["saved"] += 1
    assert outcomes["raised"] >= 3


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda x: x * 0, "it has other n"),
        (lambda x: x[:1], r"it is float32\[1, 3\], and its description"),
    ],
    ids=["numbers", "shape"],
)
def test_other_arrays_than_those_that_were_given(saved, monkeypatch, wrong, match):
    write = writing.write
    written = lambda folder, about, arrays: write(folder, about, list(map(wrong, arrays)))
    monkeypatch.setattr(writing, "write", written)
    for path, replace in ((saved, True), (saved.parent / "4", False)):
        fails(path, replace, "what was written cannot be read back at 'w': " + match)


def test_arrays_without_checksums_are_no_checkpoint(saved, monkeypatch):
    """As of a version of orbax that has another place for what is on disk."""
    write, codecs = writing.write, chunks.CODECS

    def plain(*given):
        with monkeypatch.context() as patch:
            patch.setattr(chunks, "CODECS", codecs[:1])
            write(*given)

    monkeypatch.setattr(writing, "write", plain)
    for path, replace in ((saved, True), (saved.parent / "4", False)):
        fails(path, replace, "what was written cannot be read back at 'w': .*codecs")


def test_another_description_than_that_which_was_given(saved, damaging):
    def other(folder):
        (folder / "about" / "metadata").write_bytes(
            (saved / "about" / "metadata").read_bytes().replace(b" ", b"  ")
        )

    damaging(other)  # what the one before says, in other words
    about = {"data": "wiki"}
    refused("its description says something else", sparsejax.save, saved, STATE,
            about=about, replace=True)  # fmt: skip
    sparsejax.save(saved, STATE, replace=True)


def test_bits_that_no_comparison_of_floats_sees(tmp_path):
    bits = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0], np.uint32)
    state = {"w": bits.view(np.float32), "z": jnp.float32(-0.0)}
    sparsejax.save(tmp_path / "nan", state)
    restored = sparsejax.restore(tmp_path / "nan", state)
    assert helpers.octets(restored) == helpers.octets(state)
    zero = lambda x: reading._is_same(np.asarray(x), np.zeros((), np.float32))
    assert zero(np.float32(0))
    assert not zero(np.float32(-0.0))
    assert not zero(np.float64(0))


# --- Which process, and which device, looks at which numbers.


SHARDINGS = [
    ((5, 3), {"data": 8}, P(), False),
    ((5, 16), {"data": 8}, P(), True),
    ((16, 3), {"data": 8}, P(), True),
    ((16, 3), {"data": 8}, P("data"), True),
    ((3, 16), {"data": 8}, P(None, "data"), True),
    ((4, 6), {"data": 2, "model": 2}, P("model"), True),
    ((4, 6), {"data": 2, "model": 2}, P(None, "model"), True),
    ((4, 6), {"data": 2, "model": 2}, P(("data", "model")), True),
    ((1, 2), {"data": 4}, P(), False),
    ((), {"data": 4}, P(), False),
    ((7,), {"data": 2, "model": 4}, P(), False),
]


@pytest.mark.parametrize(("shape", "sizes", "spec", "is_shared"), SHARDINGS)
def test_every_number_is_written_and_compared_once(shape, sizes, spec, is_shared):
    """What several devices have, they share where some axis is a multiple of them."""
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    there = NamedSharding(helpers.grid(**sizes), spec)
    seen = np.zeros(shape, int)
    by_device = collections.Counter()
    on_mesh = jax.device_put(x, there)
    for chunk in chunks.own(on_mesh):
        seen[chunk.where] += 1
        numbers = chunk.numbers()
        np.testing.assert_array_equal(numbers, x[chunk.where])
        assert numbers.shape == chunks.shape_of(on_mesh)
        (device,) = chunk.shard.devices()
        by_device[device] += 1
    assert (seen == 1).all()
    assert set(by_device.values()) == {1}
    if is_shared:
        assert len(by_device) == there.num_devices


def test_arrays_are_read_some_at_a_time(tmp_path, monkeypatch):
    state = {str(i): np.full((10, 10), i, np.float32) for i in range(7)}
    sparsejax.save(tmp_path / "7", state)
    sizes = []
    batches = reading._batches

    def counted(views):
        for batch in batches(views):
            sizes.append(len(batch))
            yield batch

    monkeypatch.setattr(reading, "_batches", counted)
    for most, want in ((1000, [2, 2, 2, 1]), (1, [1] * 7), (2**30, [7])):
        monkeypatch.setattr(reading, "_AT_ONCE", most)
        sizes.clear()
        restored = sparsejax.restore(tmp_path / "7", state)
        assert sizes == want
        assert helpers.octets(restored) == helpers.octets(state)


def test_a_host_that_sees_late_what_another_wrote(saved, monkeypatch):
    """As on a network's file system, which remembers that there was no such folder."""
    there = folders.record(saved)
    late = [FileNotFoundError(2, "No such file"), FileNotFoundError(2, "No such file")]

    def record(folder):
        if late:
            raise late.pop()
        return there

    monkeypatch.setattr(folders, "record", record)
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    with pytest.raises(CheckpointError, match=r"is not there: .* all need the same path"):
        storage._seen(saved)  # alone nothing comes later
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert json.loads(storage._seen(saved))["format"] == records.FORMAT
    monkeypatch.setattr(storage, "_SEEN", 0)
    late.append(FileNotFoundError(2, "No such file"))
    with pytest.raises(CheckpointError, match="No such file"):
        storage._seen(saved)


# --- Crashes, links, and others.


def test_a_crash_before_it_was_read_back(saved, monkeypatch):
    """What nobody has read back is no checkpoint, and the next save removes it."""

    def crash(*_):
        raise KeyboardInterrupt

    new = saved.parent / "4"
    monkeypatch.setattr(reading, "check", crash)
    for path, replace in ((saved, True), (new, False)):
        with pytest.raises(KeyboardInterrupt):
            sparsejax.save(path, NEW, replace=replace)
    monkeypatch.undo()
    np.testing.assert_array_equal(sparsejax.restore(saved, LIKE)["w"], STATE["w"])
    refused("/4 was not finished, 4.sparsejax-next is what", sparsejax.restore, new, LIKE)
    sparsejax.save(new, NEW)
    sparsejax.save(saved, NEW, replace=True)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["4", "lr=[0.1]"]


def test_a_name_that_cannot_be_given(saved, monkeypatch):
    """The old one gets its name again."""
    rename = type(saved).rename

    def failing(path, to):
        if path.name.endswith("-next"):
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, to)

    monkeypatch.setattr(type(saved), "rename", failing)
    fails(saved, True, "Permission denied: .*-next")
    fails(saved.parent / "4", False, "Permission denied: .*-next")


def test_a_folder_of_somebody_else_that_came_in_the_meantime(saved, damaging):
    new = saved.parent / "4"

    def came(_):
        new.mkdir()
        (new / "thesis.txt").touch()

    damaging(came)
    refused("nothing of it is kept: Directory not empty", sparsejax.save, new, NEW)
    assert [path.name for path in new.iterdir()] == ["thesis.txt"]
    assert sorted(path.name for path in saved.parent.iterdir()) == ["4", "lr=[0.1]"]


def test_a_crash_between_two_renames(saved):
    """What is left is the checkpoint, until another one is whole."""
    saved.rename(folders.beside(saved, folders.LAST))
    np.testing.assert_array_equal(sparsejax.restore(saved, LIKE)["w"], STATE["w"])
    refused("already exists", sparsejax.save, saved, STATE)
    sparsejax.save(saved, NEW, replace=True)
    np.testing.assert_array_equal(sparsejax.restore(saved, LIKE)["w"], NEW["w"])
    assert not [x for x in saved.parent.iterdir() if "sparsejax" in x.name]


def test_a_link_is_replaced_and_its_folder_is_kept(saved):
    link = saved.parent / "last"
    link.symlink_to(saved.name)
    np.testing.assert_array_equal(sparsejax.restore(link, LIKE)["w"], STATE["w"])
    sparsejax.save(link, NEW, replace=True)
    assert not link.is_symlink()
    np.testing.assert_array_equal(sparsejax.restore(link, LIKE)["w"], NEW["w"])
    np.testing.assert_array_equal(sparsejax.restore(saved, LIKE)["w"], STATE["w"])
    assert sorted(x.name for x in saved.parent.iterdir()) == ["last", "lr=[0.1]"]


def test_what_others_have_not_finished_stays(saved):
    """orbax's own, of a folder with that name, is none of ours."""
    others = saved.parent / "4.orbax-checkpoint-tmp"
    others.mkdir()
    sparsejax.save(saved.parent / "4", STATE)
    sparsejax.save(saved.parent / "4", NEW, replace=True)
    assert others.is_dir()


def test_of_several_threads_one_saves_and_the_others_are_refused(tmp_path):
    def save(i):
        try:
            return sparsejax.save(tmp_path / "4", STATE | {"count": i})
        except CheckpointError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        outcomes = list(pool.map(save, range(4)))
    assert outcomes.count(None) == 1
    assert all("already exists" in error for error in outcomes if error)
    np.testing.assert_array_equal(sparsejax.restore(tmp_path / "4", LIKE)["w"], STATE["w"])


def test_a_dtype_that_cannot_be_written_is_named(tmp_path):
    wrong = [np.array(["a"]), np.array([b"a"]), np.zeros(2, np.longdouble)]
    wrong += [np.zeros(2, "datetime64[s]"), np.zeros(2, "V3"), jnp.zeros(2, jnp.uint4)]
    for x in wrong:
        match = f"'b/x' is {re.escape(str(x.dtype))}: convert it"
        refused(match, sparsejax.save, tmp_path / "4", {"b": {"x": x}}, error=ArgumentError)
    assert not (tmp_path / "4").exists()
    for dtype in (">f4", "int4", "float8_e4m3fn", "complex64"):
        x = np.ones(2).astype(dtype)
        sparsejax.save(tmp_path / dtype, {"x": x})
        restored = sparsejax.restore(tmp_path / dtype, {"x": x})["x"]
        np.testing.assert_array_equal(restored, x)


# --- In a bucket, of which nothing is renamed.


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A folder that is taken for one of a bucket, since it has the type of its paths."""
    from etils import epath

    folder = epath.Path(tmp_path / "bucket")
    base = lambda folder: {"driver": "file", "path": f"{folder / 'state'}/"}
    monkeypatch.setattr(reading, "_base", base)
    monkeypatch.setattr(folders, "folder_of", lambda path: folder / path)
    return folder


def test_what_cannot_be_read_back_is_removed_from_a_bucket(bucket, damaging):
    sparsejax.save("2", STATE)
    np.testing.assert_array_equal(sparsejax.restore("2", LIKE)["w"], STATE["w"])
    refused("in a bucket no folder takes", sparsejax.save, "2", NEW, replace=True)
    damaging(lambda folder: (folder / "state" / "manifest.ocdbt").unlink())
    refused("nothing of it is kept: what was written", sparsejax.save, "4", NEW)
    assert [path.name for path in bucket.iterdir()] == ["2"]
