"""Buckets that come by their elements are exchanged as one, and are counted as one."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import SparseTensor, schemes, sparsifiers
from sparsejax.advise import profile_from_state
from sparsejax.schemes import base
from sparsejax.schemes.base import MOST_UNITS
from sparsejax.transforms.buckets import Bucket, ByRules, joint
from sparsejax.units import ownership
from tests import helpers
from tests.helpers import mesh_of


RANKS = 4
# In the order of the tree a table stands between two kernels: of the buckets it is last.
SHAPES = {"a_kernel": (40, 50), "b_embedding": (512, 8), "c_kernel": (3000,)}
BUCKETS = ["a_kernel and 1 more", "b_embedding"]
LAID = ["a_kernel", "c_kernel", "b_embedding"]
ROOMS = {"a_kernel": 30, "b_embedding": 100, "c_kernel": 50}
ONE = {"w": (sum(math.prod(shape) for shape in SHAPES.values()),)}
SPARSE = {".*": "sparse"}


def sync(scheme, **options):
    return sparsejax.sync(scheme, rules=SPARSE, reduce="sum", **options)


def zeros(shapes):
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


def drawn(shared=False, ranks=RANKS):
    """Entries [ranks, ...] by leaf, small integers; and the same of all leaves as one."""
    rng = np.random.default_rng(3)
    grads, start, laid = {}, 0, []
    for name in LAID:
        size, room = math.prod(SHAPES[name]), ROOMS[name]
        indices = [rng.permutation(size)[:room] for _ in range(ranks)]
        indices = np.array(indices[:1] * ranks if shared else indices, np.int32)
        if not shared:
            indices[:, -3:] = size  # unused
        values = rng.integers(1, 9, indices.shape).astype(np.float32)
        grads[name] = SparseTensor(indices, values, SHAPES[name], shared)
        laid.append((np.where(indices < size, indices + start, ONE["w"][0]), values))
        start += size
    indices, values = (np.concatenate(x, axis=1) for x in zip(*laid, strict=True))
    return grads, {"w": SparseTensor(indices.astype(np.int32), values, ONE["w"], shared)}


def exact(tensor):
    """The sum of entries over the ranks, in float64."""
    size = math.prod(tensor.shape)
    total = np.zeros(size + 1)
    np.add.at(total, tensor.indices, tensor.values.astype(np.float64))
    return total[:size].reshape(tensor.shape)


def on_rank(tensor, shared):
    """The entries of this rank; shared indices are known to be the same on all ranks."""
    own = jax.tree.map(lambda x: x[0], tensor)
    return own if shared is None else dataclasses.replace(own, indices=shared)


def program(tx, params, n=RANKS, check_vma=True, given=None):
    """From gradients [n, ...] and a state to updates and the next state, and the first.

    The indices of `given` entries that are shared are taken from there.
    """
    fixed = {k: jnp.asarray(x.indices[0]) for k, x in (given or {}).items() if x.shared}
    state = sparsejax.init(tx, params, mesh_of(n))
    specs = sparsejax.state_specs(state)

    def step(grads, state):
        grads = {k: on_rank(x, fixed.get(k)) for k, x in grads.items()}
        return tx.update(grads, state)

    step = helpers.shard_map(
        step,
        mesh=mesh_of(n),
        in_specs=(P("data"), specs),
        out_specs=(P(), specs),
        check_vma=check_vma,
    )
    return step, state


def traced(tx, params, grads, **options):
    step, state = program(tx, params, **options)
    return helpers.collectives(jax.make_jaxpr(step)(grads, state))


@pytest.mark.parametrize(
    ("scheme", "shared"),
    [
        (schemes.Zen(), False),
        *helpers.slow((schemes.HierarchicalCentralization(), False), (schemes.Zen(), True)),
    ],
)
def test_a_table_and_kernels_are_one_exchange(scheme, shared):
    several, one = drawn(shared)
    found = traced(sync(scheme), zeros(SHAPES), several, given=several)
    assert found == traced(sync(scheme), zeros(ONE), one, given=one)
    assert found


@pytest.mark.slow
def test_a_sparsifier_in_front_makes_a_table_and_kernels_one_exchange():
    dgc = sparsejax.dgc(0.05, min_size=1)
    tx = optax.chain(dgc, sync(schemes.Zen()))
    stack = lambda shape, dtype: jax.ShapeDtypeStruct((RANKS, *shape), dtype)
    dense = {name: stack(shape, jnp.float32) for name, shape in SHAPES.items()}
    room = sum(sparsifiers.DGC(0.05).capacity(math.prod(x)) for x in SHAPES.values())
    one = SparseTensor(stack((room,), jnp.int32), stack((room,), jnp.float32), ONE["w"])
    wanted = traced(sync(schemes.Zen()), zeros(ONE), {"w": one})
    found = traced(tx, zeros(SHAPES), dense)
    # In front of it the norm of what was left out is agreed on, and nothing else is sent.
    assert found == [("psum", 4, ()), *wanted]


class Plain(base.Scheme):
    """A scheme for the test that compiles fast: dense sums of what it is given."""

    def __call__(self, x, state, wire):
        return base.sum_densely(x, state, wire)


@pytest.mark.parametrize(
    ("shared", "check_vma"), [(False, True), *helpers.slow((True, False))]
)
def test_leaves_get_their_own_sums_and_what_was_sent_is_counted_once(shared, check_vma):
    several, one = drawn(shared)
    seen = []
    for grads, shapes in ((several, SHAPES), (one, ONE)):
        options = {"check_vma": check_vma, "given": grads}
        step, state = program(sync(Plain()), zeros(shapes), **options)
        updates, state = jax.jit(step)(grads, state)
        seen.append(sparsejax.metrics(state))
        for name, tensor in grads.items():
            want = exact(tensor).astype(np.float32)
            assert np.count_nonzero(want)
            shards = [np.asarray(x.data) for x in updates[name].addressable_shards]
            assert len(shards) == RANKS
            assert all(shard.tobytes() == want.tobytes() for shard in shards)
    assert_counted_once(*seen)


def assert_counted_once(of, whole):
    """The metrics of buckets against those of the same entries as one leaf."""
    for what in ("wire_bytes", "payload_bytes", "inside_bytes", "dense_bytes", "rounds"):
        parts = [float(of[f"sync/{name}/{what}"]) for name in BUCKETS]
        assert sum(parts) == whole[f"sync/w/{what}"], what
    for what in ("wire_bytes", "payload_bytes", "dense_bytes"):
        assert of[f"sync/{what}"] == whole[f"sync/{what}"]
        assert of[f"sync/total_{what}"] == whole[f"sync/total_{what}"]
    for what in ("density_before", "density_after", "push_imbalance", "pull_imbalance"):
        each = {float(of[f"sync/{name}/{what}"]) for name in BUCKETS}
        assert each == {float(whole[f"sync/w/{what}"])}, what
    # By the room for entries, and by the elements.
    share = ROOMS["b_embedding"] / sum(ROOMS.values())
    sent = float(of["sync/b_embedding/wire_bytes"])
    assert abs(sent - share * float(whole["sync/wire_bytes"])) <= 2
    assert of["sync/b_embedding/dense_bytes"] == 2 * 3 / 4 * 4 * 512 * 8


def assert_each_array_is_there_once(state):
    held = [x.addressable_shards[0].data for x in jax.tree.leaves(state)]
    assert len({x.unsafe_buffer_pointer() for x in held}) == len(held)


def test_a_state_that_buckets_share_may_be_donated():
    """What comes out for all of them is an array each."""
    step, state = program(sync(Plain()), zeros(SHAPES))
    step, grads = jax.jit(step, donate_argnums=1), drawn()[0]
    for count in (1, 2):
        _, state = step(grads, state)
        assert_each_array_is_there_once(state)
        assert int(state.step) == count


def test_what_a_scheme_hands_on_as_it_was_stays_the_buckets_own():
    """Where nothing is compiled the arrays that went in come out, and are of one bucket."""
    first, other = ([jnp.zeros(2), jnp.zeros(3)] for _ in range(2))
    made = jnp.ones(3)
    of_first, of_other = joint.kept([first[0], made], [first, other])
    assert of_first[0] is first[0]
    assert of_other[0] is other[0]
    assert of_first[1] is of_other[1] is made


@pytest.mark.slow
def test_all_buckets_remember_the_exchange_that_they_shared():
    """So the next step may find them apart; a plan reads the same of each."""
    scheme = schemes.Zen("bytes")
    step, state = program(sync(scheme), zeros(SHAPES))
    _, state = jax.jit(step)(drawn()[0], state)
    curves = [np.asarray(x.curve) for x in state.inner.schemes.values()]
    assert len(curves) == 2
    np.testing.assert_array_equal(*curves)
    assert np.any(curves[0] != scheme.init(jax.ShapeDtypeStruct((9,), "float32"), None)[0])
    found = profile_from_state(state, zeros(SHAPES), ranks=RANKS, rules=SPARSE)
    shares = [found[x].counts / n for x, n in (("a_kernel", 2000), ("b_embedding", 512))]
    np.testing.assert_allclose(*shares, rtol=1e-6)


def test_a_dense_step_keeps_buckets_apart_and_the_state_alike():
    step, state = program(sparsejax.warm_up(sync(schemes.AGSparse()), 2), zeros(SHAPES))
    _, after = jax.eval_shape(step, drawn()[0], state)
    assert jax.tree.structure(after) == jax.tree.structure(state)


class Counting(schemes.AGSparse):
    """A scheme for the test: it remembers something of each unit."""

    def init(self, like, wire):
        return jnp.zeros(like.shape[0])


def names_of(lists):
    return [[bucket.name for bucket in joined] for joined in lists]


def joined(shapes, scheme=None, shared=None, rules=None):
    """The names of the buckets that are exchanged as one."""
    leaves = [jax.ShapeDtypeStruct(*x) for x in shapes.values()]
    buckets = ByRules(scheme or schemes.Zen(), rules or SPARSE).buckets(
        list(shapes), leaves
    )
    shared = [False] * len(leaves) if shared is None else shared
    return names_of(joint.together(buckets, leaves, shared))


def test_only_what_is_alike_is_joined():
    f32, bf16 = jnp.float32, jnp.bfloat16
    shapes = {"embedding": ((64, 8), f32), "kernel": ((50,), f32)}
    together, apart = [["embedding", "kernel"]], [["embedding"], ["kernel"]]
    assert joined(shapes) == together
    assert joined(shapes, shared=[True, True]) == together
    assert joined(shapes, shared=[True, False]) == apart
    assert joined(shapes, shared=[False, None]) == apart
    assert joined(shapes, shared=[None, None]) == apart
    assert joined(shapes | {"kernel": ((50,), bf16)}) == apart
    other = {"kernel": schemes.SparCML(), "embedding": "sparse"}
    assert joined(shapes, rules=other) == apart
    murmur = schemes.BalancedParallelism(ownership=ownership.MurmurHash(seed=3))
    assert joined(shapes, murmur) == apart
    assert joined(shapes, Counting()) == apart
    # A dense sum of both would only cost a copy.
    large = {"embedding": ((512, 128), f32), "kernel": ((512, 128), f32)}
    assert joined(large, schemes.AllReduce()) == apart


def test_as_many_are_joined_as_can_be_numbered():
    leaves = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (MOST_UNITS - 9, 5, 9)]
    buckets = [
        Bucket(name, schemes.Zen(), (i,), (name,), (leaf.size,), ())
        for i, (name, leaf) in enumerate(zip("abc", leaves, strict=True))
    ]
    lists = joint.together(buckets, leaves, [False] * 3)
    assert names_of(lists) == [["a", "b"], ["c"]]
