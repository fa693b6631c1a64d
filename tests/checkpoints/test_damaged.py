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
from sparsejax.checkpoints import checksums
from sparsejax.errors import CheckpointError
from tests import helpers
from tests.checkpoints.cases import refused


pytest.importorskip("orbax.checkpoint")

FLIPS = 60


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


def test_bits_that_turned_anywhere(saved, state, like):
    """In files in turn, each at random places; in those of arrays none is left unseen."""
    rng = random.Random(5)
    each = [file for file in files(saved) if file.stat().st_size]
    seen = 0
    for i in range(FLIPS):
        file = each[i % len(each)]
        content = file.read_bytes()
        bit = rng.randrange(8 * len(content))
        with instead(file, flipped(content, bit)):
            seen += is_refused(saved, like, state)
    assert not is_refused(saved, like, state)
    # How much of its files matters is for orbax to say; were nearly nothing refused, this
    # would try nothing.
    assert seen > FLIPS / 6


def test_every_file_cut_off_or_gone(saved, state, like):
    rng = random.Random(6)
    seen = 0
    for file in files(saved):
        content = file.read_bytes()
        for end in {0, len(content) // 2, rng.randrange(len(content) or 1)}:
            with instead(file, content[:end]):
                seen += is_refused(saved, like, state)
        with instead(file, None):
            seen += is_refused(saved, like, state)
    assert seen > 6


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
    assert checksums.is_sealed(given)
    given["tree"]["parts"]["epoch"]["value"] = 4
    with instead(file, json.dumps(given).encode()):
        refused("5/about/metadata is damaged: its checksum", sparsejax.restore, saved, like)
    with instead(file, json.dumps(checksums.sealed(given), indent=3).encode()):
        assert sparsejax.restore(saved, like)["epoch"] == 4


def test_an_orbax_without_that_place_is_told_of(tmp_path, state, like, monkeypatch):
    from orbax.checkpoint._src.serialization import tensorstore_utils

    monkeypatch.delattr(tensorstore_utils, "_build_zarr3_metadata")
    with pytest.warns(UserWarning, match="no place for checksums"), checksums.of_chunks():
        pass
