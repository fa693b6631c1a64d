"""`all_reduce`, `SparseTensor` and `data_parallel`, as a user calls them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import schemes
from tests.helpers import gradients, grid, mesh_of, shard_map, slow


def compiled(function, n):
    step = shard_map(
        lambda *xs: function(*jax.tree.map(lambda x: x[0], xs)),
        mesh=mesh_of(n),
        in_specs=P("data"),
        out_specs=P(),
    )
    return jax.jit(step)


def run(function, n, *arrays):
    return compiled(function, n)(*arrays)


def test_a_tree_is_reduced_as_psum_does():
    rng = np.random.default_rng(0)
    tree = {
        "small": rng.standard_normal((3, 4)).astype(np.float32),
        "half": rng.standard_normal((3, 5)).astype(np.float16),
        "large": np.where(rng.random((3, 300, 256)) < 0.01, 1.5, 0).astype(np.float32),
    }
    got = run(lambda x: sparsejax.all_reduce(x), 3, tree)
    want = run(lambda x: lax.psum(x, "data"), 3, tree)
    assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(lambda a: a.dtype, want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3), got, want)
    np.testing.assert_allclose(got["small"], tree["small"].sum(0), rtol=1e-6)
    np.testing.assert_array_equal(got["large"], tree["large"].sum(0))


def test_a_value_that_does_not_vary_counts_once_a_rank():
    assert run(lambda x: sparsejax.all_reduce(jnp.float32(1)), 3, np.ones(3)) == 3
    assert (
        run(lambda x: sparsejax.all_reduce(jnp.ones(4), reduce="mean")[0], 3, np.ones(3))
        == 1
    )


@pytest.mark.slow
def test_a_value_that_does_not_vary_counts_once_a_rank_under_vmap():
    """JAX's all-to-all of such an array has another shape there."""
    x, scheme = jnp.zeros(300, jnp.bfloat16).at[::7].set(2), schemes.AGSparse()
    reduce = lambda _: sparsejax.all_reduce(x, "ranks", scheme=scheme)
    total = jax.jit(jax.vmap(reduce, axis_name="ranks"))(jnp.zeros(3))
    np.testing.assert_array_equal(total, np.broadcast_to(3 * x, (3, 300)))


@pytest.mark.slow
def test_a_scheme_that_is_given_is_used_whatever_the_size():
    scheme = schemes.BalancedParallelism()
    x = np.arange(1500, dtype=np.float32).reshape(3, 500)
    step = compiled(lambda x: sparsejax.all_reduce(x, scheme=scheme), 3)
    assert "all_to_all" in str(jax.make_jaxpr(step)(x))
    np.testing.assert_array_equal(step(x), x.sum(0))


@functools.cache
def sum_of_entries(scheme, n, units):
    def reduce(i, v):
        tensor = sparsejax.SparseTensor(i, v, (units, 2))
        return sparsejax.all_reduce(tensor, scheme=scheme)

    return compiled(reduce, n)


@pytest.mark.parametrize(("scheme", "n"), [(None, 2), *slow((schemes.Zen(), 5))])
@pytest.mark.parametrize("kind", ["shuffled", "twice", "ascending", "gaps"])
def test_entries_in_any_order_add_up_to_ascending_ones(kind, scheme, n):
    units, capacity = 3000, 60
    rng = np.random.default_rng(n)
    indices = np.stack([rng.choice(400, capacity, replace=False) for _ in range(n)])
    if kind == "ascending":
        indices.sort(axis=1)
    if kind == "gaps":
        indices[:, ::3] = units
    if kind == "twice":
        indices[:, 7] = indices[:, 3]
    values = rng.integers(-2, 3, (*indices.shape, 2)).astype(np.float32)
    got = sum_of_entries(scheme, n, units)(indices.astype(np.int32), values)
    want = np.zeros((units + 1, 2))
    np.add.at(want, indices, values)
    (there,) = np.nonzero(want[:-1].any(1))
    assert got.capacity == n * capacity
    np.testing.assert_array_equal(got.to_dense(), want[:-1])
    np.testing.assert_array_equal(got.indices[: there.size], there)
    assert (np.asarray(got.indices)[there.size :] == units).all()
    np.testing.assert_array_equal(got.values[: there.size], want[there])


def test_entries_make_no_array_of_the_whole_size():
    units, capacity = 1 << 24, 8

    def reduce(i, v):
        return sparsejax.all_reduce(sparsejax.SparseTensor(i[0], v[0], (units,)))

    step = jax.jit(shard_map(reduce, mesh=mesh_of(4), in_specs=P("data"), out_specs=P()))
    like = jax.ShapeDtypeStruct((4, capacity), jnp.int32)
    compiled = step.lower(like, like.update(dtype=jnp.float32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < units / 64


@pytest.mark.slow
def test_two_axes_may_be_one_axis_of_ranks():
    """axis_name=("host", "chip") adds up over both; naming one leaves the other alone."""
    mesh = grid(host=2, chip=4)
    x = gradients(8, 1001, 0.05)
    scheme = schemes.BalancedParallelism()

    def reduce(x):
        both = sparsejax.all_reduce(x[0], ("host", "chip"), scheme=scheme)
        return both, sparsejax.all_reduce(x[0], "chip", scheme=scheme)[None]

    step = shard_map(
        reduce, mesh=mesh, in_specs=P(("host", "chip")), out_specs=(P(), P("host"))
    )
    both, by_host = jax.jit(step)(x)
    np.testing.assert_array_equal(both, x.sum(0))
    np.testing.assert_array_equal(by_host, x.reshape(2, 4, -1).sum(1))


def of_entries(x):
    """The sum of the entries of which x [1000] has values, as an array."""
    places = jnp.array([3, 900, 7], jnp.int32)
    tensor = sparsejax.SparseTensor(places, x[places], x.shape)
    return sparsejax.all_reduce(tensor, "data").to_dense()


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, *slow(False)])
def test_it_can_be_differentiated_as_psum_can(check_vma):
    x = np.zeros((2, 1000), np.float32)
    x[:, [3, 7, 900]] = 1
    weights = 1 + np.arange(1000)

    def gradient(reduce):
        run = jax.grad(lambda x: (reduce(x[0]) ** 2 * weights).sum())
        specs = {"in_specs": P("data"), "out_specs": P("data")}
        step = shard_map(run, mesh=mesh_of(2), **specs, check_vma=check_vma)
        return np.asarray(jax.jit(step)(x))

    scheme = schemes.BalancedParallelism()
    ours = gradient(lambda x: sparsejax.all_reduce(x, "data", scheme=scheme))
    theirs = gradient(lambda x: lax.psum(x, "data"))
    assert np.abs(theirs).max() > 0
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(gradient(of_entries), np.where(x != 0, theirs, 0))


def test_a_sparse_tensor_without_room_is_zero():
    def reduce(_):
        empty = sparsejax.SparseTensor(jnp.zeros(0, jnp.int32), jnp.zeros(0), (10,))
        return sparsejax.all_reduce(empty)

    got = run(reduce, 2, np.ones(2))
    assert got.shape == (10,)
    assert got.capacity == 0
