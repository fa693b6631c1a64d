"""A bit that has turned on disk, anywhere, is found, or all comes back as it was saved."""

import contextlib
import json
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from sparsejax.checkpoints import records
from sparsejax.errors import CheckpointError
from tests import helpers
from tests.checkpoints.cases import refused


pytest.importorskip("orbax.checkpoint")

KINDS = ("flipped", "zeroed", "cut off", "appended", "gone")
CHANGES = 180


def made():
    """Numbers that no compressor makes shorter, so that most bits on disk are theirs."""
    rng = np.random.default_rng(0)
    mesh = helpers.mesh_of(2)
    there = NamedSharding(mesh, P("data"))
    draw = lambda *shape: rng.integers(0, 2**32, shape, np.uint32)
    return {
        "sharded": jax.device_put(draw(2, 300), there),
        "replicated": jax.device_put(draw(40, 3), NamedSharding(mesh, P())),
        "numpy": draw(500),
        "half": jnp.arange(20, dtype=jnp.bfloat16),
        "key": jax.random.key(3),
        "epoch": 5,
    }


@pytest.fixture(scope="module")
def state():
    return made()


@pytest.fixture(scope="module")
def like(state):
    blank = lambda x: jax.device_put(jnp.zeros_like(x), x.sharding)
    arrays = {name: blank(state[name]) for name in ("sharded", "replicated", "half")}
    rest = {"numpy": np.zeros_like(state["numpy"]), "key": jax.random.key(0), "epoch": 0}
    return arrays | rest


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    path = tmp_path_factory.mktemp("damaged") / "5"
    sparsejax.save(path, state, about={"data": "wiki"})
    return path


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@contextlib.contextmanager
def instead(file, content):
    """While its block runs, a file has other bytes; none where it is gone."""
    kept = file.read_bytes()
    try:
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        yield
    finally:
        file.write_bytes(kept)


def flipped(content, bit):
    turned = bytearray(content)
    turned[bit // 8] ^= 1 << bit % 8
    return bytes(turned)


def is_refused(saved, like, state):
    """Whether a checkpoint is refused, by its name; else what was saved comes back."""
    try:
        restored = sparsejax.restore(saved, like, about={"data": "wiki"})
    except CheckpointError as error:
        return str(saved) in str(error) or pytest.fail(str(error))
    assert helpers.octets(restored) == helpers.octets(state)
    return False


def changed(content, kind, rng):
    """What is left of a file that was changed at a random place; None where it is gone."""
    at = rng.randrange(len(content))
    end = at + rng.randrange(1, 64)
    return {
        "flipped": flipped(content, 8 * at + rng.randrange(8)),
        "zeroed": content[:at] + bytes(len(content[at:end])) + content[end:],
        "cut off": content[:at],
        "appended": content + rng.randbytes(end - at),
        "gone": None,
    }[kind]


def test_a_file_that_changed_anywhere(saved, state, like):
    """In files in turn, each at random places: refused, or what was saved comes back."""
    rng = random.Random(5)
    each = [file for file in files(saved) if file.stat().st_size]
    seen = 0
    for i in range(CHANGES):
        file, kind = each[i // len(KINDS) % len(each)], KINDS[i % len(KINDS)]
        with instead(file, changed(file.read_bytes(), kind, rng)):
            seen += is_refused(saved, like, state)
    assert not is_refused(saved, like, state)
    # How much of its files matters is for orbax to say; were nearly nothing refused, this
    # would try nothing.
    assert seen > CHANGES / 6


def test_numbers_that_turned_are_named(saved, like):
    """Where the numbers themselves lie, no other part of the file shows it."""
    shard = np.asarray(made()["sharded"])[1].tobytes()
    (file,) = [file for file in files(saved) if shard in file.read_bytes()]
    content = file.read_bytes()
    for byte in (0, 17, len(shard) - 1):
        place = content.index(shard) + byte
        with instead(file, flipped(content, 8 * place + byte % 8)):
            match = "the arrays of the checkpoint in .* or damaged at 'sharded': "
            refused(match, sparsejax.restore, saved, like)


def test_others_who_read_a_part_find_it_too(saved, state, like):
    """On other shardings as on those of who saved it."""
    shard = np.asarray(state["sharded"])[1].tobytes()
    (file,) = [file for file in files(saved) if shard in file.read_bytes()]
    content = file.read_bytes()
    there = NamedSharding(helpers.mesh_of(4), P(None, "data"))
    other = like | {"sharded": jax.device_put(jnp.zeros((2, 300), jnp.uint32), there)}
    assert helpers.octets(sparsejax.restore(saved, other)) == helpers.octets(state)
    with instead(file, flipped(content, 8 * content.index(shard) + 3)):
        refused("cannot be read", sparsejax.restore, saved, other)


def test_a_chunk_that_is_in_no_table_is_not_zeros(saved, like, tmp_path):
    """As where it was never written: the tables themselves are whole."""
    import tensorstore

    copy = tmp_path / "5"
    shutil.copytree(saved, copy)
    parts = json.loads((copy / "about" / "metadata").read_text())["tree"]["parts"]
    base = {"driver": "file", "path": f"{copy / 'state'}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    chunk = f"{parts['sharded']['array']}/c/1/0"
    assert chunk.encode() in store.list().result()
    store.write(chunk, None).result()
    assert chunk.encode() not in store.list().result()
    refused("or damaged at 'sharded': ", sparsejax.restore, copy, like)


def test_what_the_description_says_has_a_checksum(saved, like):
    """Where it stays JSON and of this model, nothing else shows it."""
    file = saved / "about" / "metadata"
    given = json.loads(file.read_text())
    assert given["crc32"] == records.checksum(given)
    given["tree"]["parts"]["epoch"]["value"] = 4
    with instead(file, json.dumps(given).encode()):
        refused("5/about/metadata is damaged: its checksum", sparsejax.restore, saved, like)
    with instead(file, json.dumps(records.sealed(given), indent=3).encode()):
        assert sparsejax.restore(saved, like)["epoch"] == 4
