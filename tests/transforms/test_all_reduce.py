"""`all_reduce`, `SparseTensor` and `data_parallel`, as a user calls them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import schemes
from tests.helpers import KINDS, gradients, grid, mesh_of, shard_map, slow


def compiled(function, n, check_vma=True):
    step = shard_map(
        lambda *xs: function(*jax.tree.map(lambda x: x[0], xs)),
        mesh=mesh_of(n),
        in_specs=P("data"),
        out_specs=P(),
        check_vma=check_vma,
    )
    return jax.jit(step)


def run(function, n, *arrays, check_vma=True):
    return compiled(function, n, check_vma)(*arrays)


@pytest.mark.parametrize("check_vma", [True, *slow(False)])
def test_a_tree_is_reduced_as_psum_does(check_vma):
    rng = np.random.default_rng(0)
    tree = {
        "small": rng.standard_normal((3, 4)).astype(np.float32),
        "half": rng.standard_normal((3, 5)).astype(np.float16),
        "large": np.where(rng.random((3, 300, 256)) < 0.01, 1.5, 0).astype(np.float32),
    }
    got = run(lambda x: sparsejax.all_reduce(x), 3, tree, check_vma=check_vma)
    want = run(lambda x: lax.psum(x, "data"), 3, tree, check_vma=check_vma)
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
@pytest.mark.parametrize(
    "scheme",
    [
        schemes.AGSparse(),
        *slow(schemes.Zen()),
    ],
)
def test_a_value_that_does_not_vary_counts_once_a_rank_under_vmap(scheme):
    """JAX's all-to-all of such an array has another shape there."""
    x = jnp.zeros(300, jnp.bfloat16).at[::7].set(2)
    reduce = lambda _: sparsejax.all_reduce(x, "ranks", scheme=scheme)
    total = jax.jit(jax.vmap(reduce, axis_name="ranks"))(jnp.zeros(3))
    np.testing.assert_array_equal(total, np.broadcast_to(3 * x, (3, 300)))


@pytest.mark.slow
def test_a_scheme_that_is_given_is_used_whatever_the_size():
    scheme = schemes.BalancedParallelism()
    x = np.arange(1500, dtype=np.float32).reshape(3, 500)
    lowered = jax.make_jaxpr(
        shard_map(
            lambda x: sparsejax.all_reduce(x[0], scheme=scheme),
            mesh=mesh_of(3),
            in_specs=P("data"),
            out_specs=P(),
        )
    )(x)
    assert "all_to_all" in str(lowered)
    np.testing.assert_array_equal(
        run(lambda x: sparsejax.all_reduce(x, scheme=scheme), 3, x), x.sum(0)
    )


@pytest.mark.slow
@pytest.mark.parametrize("row", [(3,), *slow(((),))])
def test_sparse_tensors_with_duplicates_and_padding(row):
    units, capacity = 1000, 40
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 60, (3, capacity)).astype(np.int32)
    indices[:, -7:] = units
    values = rng.integers(-3, 4, (3, capacity, *row)).astype(np.float32)
    shape = (units, *row)

    def reduce(i, v):
        return sparsejax.all_reduce(sparsejax.SparseTensor(i, v, shape))

    got = run(reduce, 3, indices, values)
    want = np.zeros((units + 1, *row))
    np.add.at(want, indices.reshape(-1), values.reshape(-1, *row))
    np.testing.assert_array_equal(got.to_dense(), want[:-1])
    assert got.indices.shape == (3 * capacity,)
    used = np.asarray(got.indices)[: np.count_nonzero(want[:-1].reshape(units, -1).any(1))]
    assert (np.diff(used) > 0).all()
    assert (np.asarray(got.indices)[len(used) :] == units).all()


@functools.cache
def sum_of_entries(scheme, n, units):
    def reduce(i, v):
        tensor = sparsejax.SparseTensor(i, v, (units,))
        return sparsejax.all_reduce(tensor, scheme=scheme)

    return compiled(reduce, n)


@pytest.mark.parametrize(
    ("scheme", "n"),
    [(None, 1), (None, 2), *slow((schemes.AGSparse(), 2), (schemes.Zen(), 5))],
)
@pytest.mark.parametrize("kind", ["shuffled", "twice", *slow("ascending", "gaps")])
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
    values = rng.integers(-2, 3, indices.shape).astype(np.float32)
    got = sum_of_entries(scheme, n, units)(indices.astype(np.int32), values)
    want = np.zeros(units + 1)
    np.add.at(want, indices.reshape(-1), values.reshape(-1))
    (there,) = np.nonzero(want[:-1])
    assert got.capacity == n * capacity
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
def test_entries_can_be_differentiated_as_psum_can():
    indices = np.array([[3, 900, 7], [7, 3, 999]], np.int32)
    weights = np.random.default_rng(0).standard_normal(1000).astype(np.float32)

    def gradient(i, v):
        def loss(v):
            total = sparsejax.all_reduce(sparsejax.SparseTensor(i[0], v[0], (1000,)))
            return (total.to_dense() * weights).sum()

        return jax.grad(loss)(v)

    step = shard_map(gradient, mesh=mesh_of(2), in_specs=P("data"), out_specs=P("data"))
    got = jax.jit(step)(indices, np.ones((2, 3), np.float32))

    def psums(v, i):
        def loss(v):
            return (lax.psum(jnp.zeros(1000).at[i[0]].add(v[0]), "data") * weights).sum()

        return jax.grad(loss)(v)

    mapped = shard_map(psums, mesh=mesh_of(2), in_specs=P("data"), out_specs=P("data"))
    want = jax.jit(mapped)(np.ones((2, 3), np.float32), indices)
    assert np.abs(want).min() > 0
    np.testing.assert_array_equal(got, want)


def test_a_sparse_tensor_is_a_tree_with_a_static_shape():
    tensor = sparsejax.SparseTensor(jnp.array([2, 0]), jnp.ones((2, 3)), (4, 3))
    doubled = jax.jit(lambda t: jax.tree.map(lambda x: x * 2, t))(tensor)
    assert doubled.shape == (4, 3)
    assert (tensor.units, tensor.capacity) == (4, 2)
    np.testing.assert_array_equal(tensor.to_dense()[2], [1, 1, 1])


@pytest.mark.parametrize("kind", ["explicit", *slow("auto")])
def test_a_train_step_over_meshes_of_both_kinds(kind):
    """Explicit axes are the default of jax.make_mesh, NumPy batches that of loaders."""
    mesh = KINDS[kind](mesh_of(4))
    tx = optax.chain(
        sparsejax.zen_sync(rules={"table": "sparse", "tab": "row"}), optax.sgd(0.5)
    )

    def loss(params, batch):
        rows = params["table"][batch["ids"]]
        return jnp.mean((rows.sum(-1) - batch["y"]) ** 2), {"rows": jnp.mean(rows)}

    ids = lambda batch: {"table": batch["ids"]}
    params = {"table": jnp.ones((40, 2)), "scale": jnp.zeros(())}
    trainer = sparsejax.data_parallel(loss, tx, mesh, has_aux=True, ids=ids)
    state = trainer.init(params)
    batch = {"ids": np.arange(8, dtype=np.int32), "y": np.zeros(8, np.float32)}
    losses = []
    for _ in range(3):
        state, (value, aux) = trainer.step(state, batch)
        losses.append(float(value))
        assert aux["rows"].shape == ()
    # d loss / d row = 2 * 2 / 8 for each number: 1 -> 0.75 in both, the sum 2 -> 1.5 -> ...
    np.testing.assert_allclose(losses, [4, 4 * 0.5**2 * 2.25, losses[2]], rtol=1e-6)
    assert int(state.step) == 3
    assert float(params["table"].sum()) == 80, "the caller's parameters were touched"
    assert trainer.compiled(state)._cache_size() == 1
    assert "sync/wire_bytes" in sparsejax.metrics(state.opt_state)


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


@pytest.mark.slow
@pytest.mark.parametrize(("dense", "check_vma"), [(True, True), *slow((False, False))])
def test_it_can_be_differentiated_as_psum_can(dense, check_vma):
    x = np.zeros((2, 2000), np.float32)
    x[:, :10] = 1
    x[0] += dense

    def gradient(reduce):
        def run(x):
            loss = lambda x: (reduce(x[0]) ** 2).sum()
            return jax.grad(loss)(x)

        step = shard_map(
            run,
            mesh=mesh_of(2),
            in_specs=P("data"),
            out_specs=P("data"),
            check_vma=check_vma,
        )
        return np.asarray(jax.jit(step)(x))

    scheme = schemes.BalancedParallelism()
    ours = gradient(lambda x: sparsejax.all_reduce(x, "data", scheme=scheme))
    theirs = gradient(lambda x: lax.psum(x, "data"))
    assert np.abs(theirs).max() > 0
    np.testing.assert_array_equal(ours, theirs)


def test_a_sparse_tensor_without_room_is_zero():
    def reduce(_):
        empty = sparsejax.SparseTensor(jnp.zeros(0, jnp.int32), jnp.zeros(0), (10,))
        return sparsejax.all_reduce(empty)

    got = run(reduce, 2, np.ones(2))
    assert got.shape == (10,)
    assert got.capacity == 0


def test_batches_and_parameters_may_lie_anywhere():
    """On one device, as checkpoints and loaders leave them."""
    tx = optax.chain(sparsejax.zen_sync(), optax.sgd(0.5))
    trainer = sparsejax.data_parallel(lambda p, b: jnp.sum(p["w"] * b), tx, mesh_of(4))
    state = trainer.init(jax.device_put({"w": jnp.ones(())}, jax.devices()[0]))
    for batch in (jnp.ones(8), jax.device_put(jnp.ones(8), jax.devices()[1]), np.ones(8)):
        state, _ = trainer.step(state, batch.astype(np.float32))
    assert float(state.params["w"]) == 1 - 3 * 0.5 * 2
    with pytest.raises(
        sparsejax.errors.ArgumentError, match=r"which 4 must divide; .* \[7\]"
    ):
        trainer.step(state, np.ones(7, np.float32))
