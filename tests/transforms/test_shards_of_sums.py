"""A parameter that is sharded over the axis of the sum: each rank gets its piece alone."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors
from tests import helpers
from tests.laws.test_exact_sum import SCHEMES


SHAPE = (64, 128)
ONE, TWO = dict(replica=4), dict(replica=4, fsdp=2)
THREE = dict(replica=2, fsdp=2, model=2)
# How the parameter is sharded, by mesh: rows or columns, alone or with other axes.
WHERE = {
    "rows": (ONE, P("replica", None)),
    "columns": (ONE, P(None, "replica")),
    "minor": (TWO, P(("fsdp", "replica"), None)),
    "both": (TWO, P("fsdp", "replica")),
    "three": (THREE, P(("model", "fsdp", "replica"), None)),
}


def drawn(mesh, density, rows=False):
    """Sparse partial sums of small integers."""
    rng = np.random.default_rng(0)
    shape = (mesh.size, *SHAPE)
    kept = rng.random(shape[:2])[..., None] if rows else rng.random(shape)
    numbers = rng.integers(-8, 9, shape).astype(np.float32)
    return np.where(kept < density, numbers, 0)


def zeros(mesh, shapes, specs):
    made = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return helpers.placed(made, mesh, specs)


def stepped(tx, where, x, name="w"):
    """What an update returns of partial sums of three leaves, two of them sharded."""
    sizes, spec = WHERE[where]
    mesh = helpers.grid(**sizes)
    bias = np.arange(mesh.size * 64, dtype=np.float32).reshape(-1, 64)
    scale = np.ones((mesh.size, 8), np.float32)
    specs = {name: spec, "bias": P(spec[0]), "scale": P()}
    given = {name: x, "bias": bias, "scale": scale}
    params = zeros(mesh, {key: x.shape[1:] for key, x in given.items()}, specs)
    with jax.set_mesh(mesh):
        state = tx.init(params)
    grads = {key: helpers.partial_sums(value, mesh) for key, value in given.items()}
    step = jax.jit(tx.update)
    out, after = step(grads, state, params)
    for key, param in params.items():
        assert jax.typeof(out[key]) == jax.typeof(param)
    types = lambda tree: list(map(jax.typeof, jax.tree.leaves(tree)))
    assert types(after) == types(state)
    return {key: np.asarray(value) for key, value in out.items()}, given, after


def zen(rule, **options):
    return sparsejax.zen_sync("replica", reduce="sum", rules={rule: "sparse"}, **options)


@pytest.mark.parametrize(
    ("where", "name", "density"),
    [
        ("rows", "w", 0.01),
        *helpers.slow(
            ("both", "embedding", 0.05), ("three", "w", 0.03), ("rows", "embedding", 1.0)
        ),
    ],
)
def test_each_rank_gets_its_piece_of_the_sum(where, name, density):
    mesh = helpers.grid(**WHERE[where][0])
    x = drawn(mesh, density, rows=name == "embedding")
    found, given, state = stepped(zen(name), where, x, name)
    for key, value in found.items():
        np.testing.assert_array_equal(value, given[key].sum(0))
    metrics = sparsejax.metrics(state)
    sent = float(metrics[f"sync/{name}/wire_bytes"])
    dense = float(metrics[f"sync/{name}/dense_bytes"])
    ranks, shards = mesh.shape["replica"], mesh.shape.get("fsdp", 1)
    assert dense == (ranks - 1) / ranks * x[0].nbytes / mesh.size * ranks
    assert shards * dense <= x[0].nbytes
    # No more than a reduce-scatter, but for three numbers on which ranks agree.
    assert sent <= dense + 24
    assert sent < dense or density == 1.0
    assert float(metrics[f"sync/{name}/push_imbalance"]) >= 1 or density == 0


# Those of owners push by codes and room of their own, all others in one way. Who owns units
# otherwise, and how they come back, is not asked.
PUSHED = ["balanced_algorithm_1", "balanced_capacity"]


@pytest.mark.parametrize("name", ["all_reduce", *helpers.slow(*PUSHED)])
def test_any_scheme_sums_to_pieces(name):
    tx = sparsejax.sync(
        SCHEMES[name], "replica", reduce="sum", rules={"w": "sparse"}, two_level=False
    )
    x = drawn(helpers.grid(**ONE), 0.02)
    found, given, _ = stepped(tx, "rows", x)
    for key, value in found.items():
        np.testing.assert_array_equal(value, given[key].sum(0))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "where"), [("dgc", "minor"), ("ok_topk", "columns")])
def test_what_a_rank_leaves_out_is_of_the_whole_parameter(name, where):
    tx = {
        "dgc": optax.chain(
            sparsejax.dgc(0.05, axis_name="replica", min_size=1000), zen("w")
        ),
        "ok_topk": sparsejax.ok_topk_sync(
            0.05, "replica", reduce="sum", rules={"w": "sparse"}
        ),
    }[name]
    x = drawn(helpers.grid(**WHERE[where][0]), 0.3)
    found, given, state = stepped(tx, where, x)
    held = np.asarray(sparsejax.residuals(state)["w"])
    assert held.shape[1:] == SHAPE
    assert held.any()
    np.testing.assert_array_equal(found["w"] + held.sum(0), given["w"].sum(0))


@pytest.mark.slow
def test_entries_of_several_leaves_are_one_exchange():
    """What a sparsifier selected of two kernels goes to the ranks of the pieces."""
    mesh = helpers.grid(replica=4)
    tx = optax.chain(
        sparsejax.top_k(0.1, axis_name="replica", min_size=100, memory=None),
        sparsejax.zen_sync("replica", reduce="sum", rules={"kernel": "sparse"}),
    )
    shapes = {"kernel1": (64, 32), "kernel2": (16, 21, 3)}
    rng = np.random.default_rng(0)
    given = {
        key: rng.permutation(4 * np.prod(shape)).reshape(4, *shape).astype(np.float32)
        for key, shape in shapes.items()
    }
    params = zeros(mesh, shapes, P("replica"))
    with jax.set_mesh(mesh):
        state = tx.init(params)
    grads = {key: helpers.partial_sums(value, mesh) for key, value in given.items()}
    out, _ = jax.jit(tx.update)(grads, state, params)
    for key, value in given.items():
        flat = value.reshape(4, -1)
        kept = flat.shape[1] // 10
        least = np.sort(flat, axis=1)[:, -kept - 1 :][:, :1]
        found = np.asarray(out[key]).reshape(-1)
        wanted = np.where(flat > least, flat, 0).sum(0)
        # Which of the least are kept is the sparsifier's to say.
        assert np.mean(found != wanted) < 0.01


@pytest.mark.slow
def test_a_step_of_warm_up_is_a_reduce_scatter():
    """`warm_up` sends everything: a reduce-scatter."""
    x = drawn(helpers.grid(**ONE), 0.05)
    tx = sparsejax.warm_up(zen("w"), 1)
    found, given, state = stepped(tx, "rows", x)
    np.testing.assert_array_equal(found["w"], given["w"].sum(0))
    metrics = sparsejax.metrics(state)
    assert metrics["sync/w/wire_bytes"] == metrics["sync/w/dense_bytes"]


@pytest.mark.slow
def test_adam_keeps_its_state_for_the_shard_alone():
    """By the program's memory: parameters and moments are an n-th on each device."""
    mesh = helpers.grid(replica=4)
    sizes = {}
    for spec in (P(), P("replica", None)):
        params = zeros(mesh, {"w": (4096, 64)}, spec)
        tx = optax.chain(zen("w"), optax.adam(1e-3))
        with jax.set_mesh(mesh):
            state = tx.init(params)
        grads = {"w": helpers.partial_sums(np.zeros((4, 4096, 64), np.float32), mesh)}

        def step(grads, params, state, tx=tx):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        lowered = jax.jit(step).lower(grads, params, state)
        sizes[spec] = lowered.compile().memory_analysis().output_size_in_bytes
    array = 4096 * 64 * 4
    assert 3 * array <= sizes[P()] < 3.01 * array
    assert 3 * array / 4 <= sizes[P("replica", None)] < 3.05 * array / 4


def test_pieces_that_do_not_fit_the_ranks_are_refused_by_name():
    mesh = helpers.grid(replica=2, fsdp=2, model=2)
    tx = sparsejax.zen_sync(("replica", "model"), reduce="sum", two_level=False)
    for spec in (P("replica", "model"), P("replica"), P(("model", "replica"))):
        params = zeros(mesh, {"w": (8, 8)}, spec)
        grads = {"w": helpers.partial_sums(np.zeros((8, 8, 8), np.float32), mesh)}
        with pytest.raises(errors.ArgumentError, match=r"'w' .*one dimension over all of"):
            tx.init(params)
        whole = zeros(mesh, {"w": (8, 8)}, P())
        with jax.set_mesh(mesh):
            state = tx.init(whole)
        with pytest.raises(errors.ArgumentError, match=r"'w' .*one dimension over all of"):
            jax.jit(tx.update)(grads, state, params)
    params = zeros(mesh, {"w": (8, 8)}, P(("replica", "fsdp")))
    with pytest.raises(errors.ArgumentError, match=r"Shard it over \('fsdp', 'replica'\)"):
        sparsejax.zen_sync("replica", reduce="sum").init(params)
    params = zeros(mesh, {"w": (8, 8)}, P(("replica", "model")))
    with jax.set_mesh(mesh):
        state = tx.init(params)
    grads = {"w": helpers.partial_sums(np.ones((8, 8, 8), np.float32), mesh)}
    found = jax.jit(tx.update)(grads, state, params)[0]["w"]
    np.testing.assert_array_equal(np.asarray(found), 8 * np.ones((8, 8)))


@pytest.mark.slow
def test_a_piece_that_overflows_leaves_the_step_out_on_all_ranks():
    """The sum of one rank's piece alone is too large for float16."""
    mesh = helpers.grid(replica=4)
    chain = optax.chain(zen("w"), optax.sgd(1.0))
    tx = sparsejax.skip_nonfinite(chain, "replica", report=True)
    params = {"w": helpers.placed(np.zeros(SHAPE, np.float16), mesh, P("replica", None))}
    state = sparsejax.init(tx, params)
    x = np.ones((4, *SHAPE), np.float16)
    x[:, 0, 0] = 30_000
    out, state = jax.jit(tx.update)({"w": helpers.partial_sums(x, mesh)}, state, params)
    np.testing.assert_array_equal(out["w"], np.zeros(SHAPE))
    for copy in state.skipped.addressable_shards:
        assert int(copy.data) == 1
    with pytest.raises(errors.BadNumberError, match="the sum of 'w' over the ranks"):
        sparsejax.transforms.check_numbers(state)


@pytest.mark.xfail(
    jax.__version_info__ >= (0, 12),
    reason="JAX 0.12 cannot compile an unreduced array without elements",
    raises=jax.errors.JaxRuntimeError,
    strict=True,
)
@pytest.mark.parametrize("name", ["w", "embedding"])
def test_leaves_of_no_number_are_cut(name):
    mesh = helpers.grid(replica=4, fsdp=2)
    shapes = {name: (8, 0), "rows": (0, 8), "other": (8, 4)}
    specs = {name: P("replica", None), "rows": P("fsdp", "replica"), "other": P("replica")}
    tx = zen(name)
    params = zeros(mesh, shapes, specs)
    with jax.set_mesh(mesh):
        state = tx.init(params)
    grads = {
        k: helpers.partial_sums(np.ones((8, *shapes[k]), np.float32), mesh) for k in shapes
    }
    out, _ = jax.jit(tx.update)(grads, state, params)
    for key, shape in shapes.items():
        np.testing.assert_array_equal(out[key], np.full(shape, 8.0))
