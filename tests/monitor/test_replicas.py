"""Replicas are compared as bits: what differs is found and named, whichever rank it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from sparsejax.errors import ArgumentError, AxisError, ReplicaError, StateError
from sparsejax.monitor import checksums, replicas
from sparsejax.state.per_rank import PerRank
from tests import helpers


N = 4
# Leaves of all kinds of dtypes, two of them of one length, one long and one of one number.
VALUES = {
    "bf16": np.arange(-4, 8).reshape(3, 4).astype(jnp.bfloat16),
    "bool": np.arange(10) % 3 == 0,
    "complex": (np.arange(5) - 2j).astype(np.complex64),
    "count": np.int32(7),
    "f16": np.linspace(-1, 1, 12).astype(np.float16),
    "f8": np.linspace(-1, 1, 7).astype(jnp.float8_e4m3fn),
    "ids": np.arange(6, dtype=np.int32),
    "octets": np.arange(9, dtype=np.uint8),
    "w": np.random.default_rng(0).standard_normal((150, 120)).astype(np.float32),
}


def placed(mesh, spec, copies):
    """A global array whose copy, or shard, on each device is what it is told."""
    pieces = [
        jax.device_put(x, device)
        for x, device in zip(copies, mesh.devices.flat, strict=True)
    ]
    sharding = NamedSharding(mesh, spec)
    sizes = [1] * pieces[0].ndim
    for i, name in enumerate(spec):
        sizes[i] = 1 if name is None else mesh.shape[name]
    shape = tuple(a * b for a, b in zip(pieces[0].shape, sizes, strict=True))
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def everywhere(x, mesh=None):
    mesh = mesh or helpers.mesh_of(N)
    return placed(mesh, P(), [x] * mesh.size)


@functools.cache
def same():
    return jax.tree.map(everywhere, VALUES)


def apart(ranks, **leaves):
    """The tree with leaves that have these values on some ranks."""
    tree = dict(same())
    for name, other in leaves.items():
        copies = [other if i in ranks else VALUES[name] for i in range(N)]
        tree[name] = placed(helpers.mesh_of(N), P(), copies)
    return tree


def flipped(x, bit, at=0):
    """x with one bit of one element changed."""
    octets = np.array(x).reshape(-1).view(np.uint8).copy()
    width = np.asarray(x).dtype.itemsize
    octets[at * width + bit // 8] ^= np.uint8(1 << bit % 8)
    return octets.view(np.asarray(x).dtype).reshape(np.shape(x))


def test_nothing_is_said_of_copies_that_are_the_same():
    assert sparsejax.check_replicas(same()) is None
    assert sparsejax.check_replicas(same(), "data", step=4, every=2) is None


BITS = [
    (name, bit)
    for name, x in VALUES.items()
    for bit in ([0] if name == "bool" else [0, 8 * np.asarray(x).dtype.itemsize - 1])
]


@pytest.mark.parametrize(("name", "bit"), BITS)
def test_a_flipped_bit_in_one_copy_is_found_and_named(name, bit):
    last = np.size(VALUES[name]) - 1
    tree = apart([2], **{name: flipped(VALUES[name], bit, last)})
    match = rf"(?s)1 of 9 leaves.*'{name}': rank 2 \(cpu:2\) differs from the other 3\n"
    with pytest.raises(ReplicaError, match=match):
        sparsejax.check_replicas(tree)


def changed(**at):
    """w with other numbers at places of the flat array."""
    x = VALUES["w"].copy()
    for place, value in at.items():
        x.reshape(-1)[int(place[1:])] = value
    return x


W = VALUES["w"].reshape(-1)
ZEROS = np.zeros((150, 120), np.float32)
NAN = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
PAIRS = {
    "two elements swapped": (VALUES["w"], changed(_3=W[17_000], _17000=W[3])),
    "neighbours swapped": (VALUES["w"], changed(_64=W[65], _65=W[64])),
    "rows swapped": (VALUES["w"], VALUES["w"][::-1]),
    "moved by one": (VALUES["w"], np.roll(VALUES["w"], 1)),
    "equal and opposite": (VALUES["w"], changed(_3=W[3] + 0.5, _9=W[9] - 0.5)),
    "two signs": (VALUES["w"], changed(_3=-W[3], _9=-W[9])),
    "all signs": (VALUES["w"], -VALUES["w"]),
    "minus zero": (ZEROS, -ZEROS),
    "another NaN": (ZEROS + NAN[0], ZEROS + NAN[1]),
    "a one that moved": (
        np.eye(150, 120, dtype=np.float32),
        np.eye(150, 120, 1, np.float32),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_sums_of_numbers_would_not_see_is_found(name):
    own, other = PAIRS[name]
    assert own.tobytes() != other.tobytes()
    copies = [other if i == 1 else own for i in range(N)]
    tree = {**same(), "w": placed(helpers.mesh_of(N), P(), copies)}
    with pytest.raises(ReplicaError, match=r"'w': rank 1 \(cpu:1\) differs"):
        sparsejax.check_replicas(tree)
    alike = {**same(), "w": placed(helpers.mesh_of(N), P(), [other] * N)}
    sparsejax.check_replicas(alike)


def test_keys_and_numbers_of_4_and_of_64_bits_are_compared():
    mesh = helpers.mesh_of(2)
    keys = [jax.random.key(seed) for seed in (0, 0, 1)]
    sparsejax.check_replicas({"key": placed(mesh, P(), keys[:2])})
    with pytest.raises(
        ReplicaError, match=r"'key': one value on rank 0 .* another on rank 1"
    ):
        sparsejax.check_replicas({"key": placed(mesh, P(), keys[1:])})
    x = np.arange(-8, 8).astype(jnp.int4)
    sparsejax.check_replicas(everywhere(x, mesh))
    with pytest.raises(ReplicaError):
        sparsejax.check_replicas(placed(mesh, P(), [x, x[::-1]]))
    with jax.enable_x64(True):
        for x in (np.arange(6.0), np.arange(6), np.arange(6) * (1 + 2j)):
            assert x.dtype.itemsize >= 8
            for bit in (0, 32, 8 * x.dtype.itemsize - 1):
                other = placed(mesh, P(), [x, flipped(x, bit, 5)])
                sparsejax.check_replicas(everywhere(x, mesh))
                with pytest.raises(ReplicaError, match="'it': one value on"):
                    sparsejax.check_replicas(other)


def test_the_first_leaves_that_differ_are_named_and_the_ranks_of_each():
    others = {name: flipped(VALUES[name], 0) for name in ("bf16", "bool", "ids", "w")}
    tree = apart([1, 3], **others)
    with pytest.raises(ReplicaError) as raised:
        sparsejax.check_replicas({"a": tree["bool"], "b": [tree], "c": tree["w"]})
    text = str(raised.value)
    assert text.startswith("replicas are not the same: of 6 of 11 leaves ranks hold")
    lines = [line for line in text.splitlines() if line.startswith("* ")]
    assert [line.split(":")[0] for line in lines[:4]] == [
        *("* 'a'", "* 'b/0/bf16'", "* 'b/0/bool'", "* 'b/0/ids'")
    ]
    assert lines[4] == "* and 2 more"
    both = "one value on rank 0 (cpu:0), rank 2 (cpu:2), and another on rank 1 (cpu:1)"
    assert both in lines[0]


def test_each_odd_rank_is_named_whatever_it_holds():
    x = VALUES["ids"]
    copies = [flipped(x, 1), x, flipped(x, 3), x]
    tree = {**same(), "ids": placed(helpers.mesh_of(N), P(), copies)}
    match = r"rank 0 \(cpu:0\), rank 2 \(cpu:2\) differ from the other 2\n"
    with pytest.raises(ReplicaError, match=match):
        sparsejax.check_replicas(tree, step=3)


def test_the_step_is_named_and_nothing_is_done_between():
    tree = apart([0], count=np.int32(8))
    for step in (1, 2, 4):
        sparsejax.check_replicas(tree, step=step, every=3)
    with pytest.raises(ReplicaError, match="not the same before step 6: of 1 of 9 leaves"):
        sparsejax.check_replicas(tree, step=6, every=3)


def test_a_program_is_compiled_once_for_a_tree():
    programs = replicas._program
    sparsejax.check_replicas(same())
    before = programs.cache_info().misses
    other, copied = apart([], w=VALUES["w"]), jax.tree.map(lambda x: x.copy(), same())
    with helpers.compilations() as compiled:
        sparsejax.check_replicas(other)
        sparsejax.check_replicas(copied)
    assert not compiled
    assert programs.cache_info().misses == before


def test_eight_bytes_of_a_leaf_are_sent():
    program = replicas._program(helpers.mesh_of(N), (P(),) * len(VALUES))
    sent = helpers.collectives(jax.make_jaxpr(program)([*same().values()]))
    assert [(each.name, each.bytes) for each in sent] == [("all_gather", 8 * len(VALUES))]


def by_rank(mesh, value=0.0):
    rows = [np.full((1, 3), i + value, np.float32) for i in range(mesh.shape["data"])]
    model = mesh.size // len(rows)
    copies = [row + j for row in rows for j in range(model)]
    return PerRank(
        placed(mesh, P("data"), copies), "data", ranks=everywhere(np.int32(2), mesh)
    )


def test_what_ranks_hold_each_for_itself_is_left_out():
    mesh = helpers.grid(data=2, model=2)
    # Told by its type: along the other axis there are copies, of which nothing is known.
    held = by_rank(mesh)
    assert len({x.data.tobytes() for x in held.value.addressable_shards}) == 3
    sparsejax.check_replicas({"residual": held, "w": everywhere(np.ones(3), mesh)})
    wrong = placed(mesh, P(), [np.int32(i // 3) for i in range(4)])
    held.ranks = wrong
    match = r"'residual/ranks': rank 3 \(cpu:3\) differs from the other 3"
    with pytest.raises(ReplicaError, match=match):
        sparsejax.check_replicas({"residual": held})
    table = sparsejax.ColumnTable.create(jax.random.key(0), 10, 4, helpers.mesh_of(2))
    sparsejax.check_replicas({"table": table})


def test_shards_of_another_axis_are_compared_with_their_copies():
    mesh = helpers.grid(data=2, model=2)
    left, right = np.arange(6, dtype=np.float32).reshape(2, 3, 1)
    w = placed(mesh, P(None, "model"), [left, right, left, right])
    sparsejax.check_replicas({"w": w})
    other = flipped(right, 3)
    w = placed(mesh, P(None, "model"), [left, right, left, other])
    match = r"rank 0 \(model 1, cpu:1\), and another on rank 1 \(model 1, cpu:3\)"
    with pytest.raises(ReplicaError, match=match):
        sparsejax.check_replicas({"w": w}, "data")
    # Copies along the other axis are compared where no axis is named.
    b = placed(mesh, P(), [left, right, left, right])
    sparsejax.check_replicas({"b": b}, "data")
    with pytest.raises(ReplicaError, match=r"rank 0 \(cpu:0\), rank 2 .* and another on"):
        sparsejax.check_replicas({"b": b})
    with pytest.raises(AxisError, match="the leaf 'b': the mesh has no axis 'hosts'"):
        sparsejax.check_replicas({"b": b}, "hosts")


def test_what_has_no_copies_is_left_out():
    mesh = helpers.mesh_of(2)
    sharded = placed(mesh, P("data"), [np.zeros(2), np.ones(2)])
    empty = everywhere(np.zeros((0, 3)), mesh)
    sparsejax.check_replicas({"x": sharded, "here": jnp.ones(2), "n": 3, "empty": empty})


def test_what_cannot_be_compared_is_refused():
    x = same()["ids"]
    with pytest.raises(ArgumentError, match=r"every=5\) needs the number of the step"):
        sparsejax.check_replicas(x, every=5)
    with pytest.raises(ArgumentError, match="step must be a Python int, got a JAX array"):
        sparsejax.check_replicas(x, step=jnp.int32(3))
    with pytest.raises(ArgumentError, match="every must be a positive int, got 0"):
        sparsejax.check_replicas(x, step=3, every=0)
    with pytest.raises(ArgumentError, match=r"between steps, outside jax\.jit"):
        jax.eval_shape(sparsejax.check_replicas, x)
    gone = everywhere(np.ones(3))
    gone.delete()
    with pytest.raises(StateError, match="'w' was deleted"):
        sparsejax.check_replicas({"w": gone})


def test_a_changed_word_always_changes_both_sums():
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 1 << 32, (4096, 5), np.uint32)
    other = rows.copy()
    at = rng.integers(0, 5, 4096)
    other[np.arange(4096), at] ^= np.uint32(1) << rng.integers(0, 32, 4096).astype(
        np.uint32
    )
    sums = [np.asarray(jax.jit(checksums.of_words)(x)) for x in (rows, other)]
    assert (sums[0] != sums[1]).all()
    assert len({row.tobytes() for row in sums[0]}) == 4096
    # Over many arrays each bit of the sums is as often set as not.
    bits = np.unpackbits(sums[0].view(np.uint8), axis=1).mean(0)
    assert ((bits > 0.45) & (bits < 0.55)).all()
