"""An update under `jit` on an explicit mesh is the one inside `shard_map`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors
from tests import helpers
from tests.laws.test_exact_sum import SCHEMES


SHAPE = (64, 129)
MESHES = {
    "replica": (dict(replica=4), P()),
    "fsdp": (dict(replica=4, fsdp=2), P("fsdp", None)),
    "whole": (dict(replica=2, fsdp=2), P()),
    "two": (dict(replica=2, fsdp=2, model=2), P(("model", "fsdp"), None)),
}


def summed(tx, mesh, spec, x, shape=SHAPE):
    """What an update under `jit` returns of partial sums, and its state."""
    params = {"w": helpers.placed(np.zeros(shape, np.float32), mesh, spec)}
    state = sparsejax.init(tx, params)
    grads = {"w": helpers.partial_sums(x, mesh)}
    step = jax.jit(tx.update)
    out, after = step(grads, state, params)
    assert jax.typeof(out["w"]) == jax.typeof(params["w"])
    types = lambda tree: list(map(jax.typeof, jax.tree.leaves(tree)))
    assert types(after) == types(state)
    return np.asarray(out["w"]), after


def stacked(tx, mesh, spec, x, shape=SHAPE):
    """The same on Auto axes, of gradients that are stacked by replica."""
    auto = helpers.auto(mesh)
    of_replica = x.reshape(mesh.shape["replica"], -1, *shape).sum(1)
    params = {"w": helpers.placed(np.zeros(shape, np.float32), auto, spec)}
    state = sparsejax.init(tx, params)
    value = helpers.placed(of_replica, auto, P("replica", *spec))
    grads = {"w": sparsejax.transforms.PerReplica(value, "replica", spec, auto)}
    out, after = jax.jit(tx.update)(grads, state, params)
    assert out["w"].sharding.is_equivalent_to(params["w"].sharding, len(shape))
    return np.asarray(out["w"]), after


def in_shard_map(tx, mesh, spec, x, shape=SHAPE):
    """The same inside a `shard_map` of one's own, of shards that are summed before."""
    sizes = [mesh.shape[name] for name in mesh.axis_names]
    of_replica = x.reshape(*sizes, *shape).sum(tuple(range(1, len(sizes))))
    params = {"w": np.zeros(shape, np.float32)}
    made_for = {"param_specs": {"w": spec}, "check_vma": False}
    state = sparsejax.init(tx, params, mesh, "replica", **made_for)
    specs = sparsejax.state_specs(state, params, {"w": spec})
    step = jax.shard_map(
        lambda x, state: tx.update({"w": x[0]}, state),
        mesh=mesh,
        in_specs=(P("replica", *spec), specs),
        out_specs=({"w": spec}, specs),
        check_vma=False,
    )
    given = helpers.placed(of_replica, mesh, P("replica", *spec))
    out, after = jax.jit(step)(given, state)
    return np.asarray(out["w"]), after


def drawn(mesh, seed=0, density=0.05):
    """Sparse partial sums of small integers, of which every sum is exact."""
    rng = np.random.default_rng(seed)
    shape = (mesh.size, *SHAPE)
    numbers = rng.integers(-8, 9, shape).astype(np.float32)
    return np.where(rng.random(shape) < density, numbers, 0)


WAYS = {"typed": summed, "stacked": stacked}


@pytest.mark.parametrize(
    ("name", "where", "way"),
    [
        ("zen", "two", "stacked"),
        *helpers.slow(
            # By owners over two fast axes, and of what is not sharded.
            ("balanced", "two", "typed"),
            ("all_reduce", "whole", "typed"),
            ("ag_sparse", "replica", "stacked"),
        ),
    ],
)
def test_a_scheme_sums_and_sends_as_inside_shard_map(name, where, way):
    sizes, spec = MESHES[where]
    mesh = helpers.grid(**sizes)
    tx = sparsejax.sync(
        SCHEMES[name], "replica", reduce="sum", rules={"w": "sparse"}, two_level=False
    )
    x = drawn(mesh)
    total, state = WAYS[way](tx, mesh, spec, x)
    np.testing.assert_array_equal(total, x.sum(0))
    own, other = in_shard_map(tx, mesh, spec, x)
    np.testing.assert_array_equal(total, own)
    found, wanted = sparsejax.metrics(state), sparsejax.metrics(other)
    assert found.keys() == wanted.keys()
    for key, value in found.items():
        if not key.endswith("inside_bytes"):
            assert float(value) == float(wanted[key]), key
    # Over the fast axis a rank sends all of its partial sum but for its own shard.
    fast = mesh.size // mesh.shape["replica"]
    times = 1 if any(spec) else 2  # what is replicated is summed by an all-reduce
    inside = times * (fast - 1) / fast * x[0].nbytes if way == "typed" else 0
    assert float(found["sync/w/inside_bytes"]) == inside
    assert float(found["sync/wire_bytes"]) > 0


CHAINS = {
    "dgc": lambda: optax.chain(
        sparsejax.dgc(0.05, axis_name="replica", min_size=100),
        sparsejax.zen_sync("replica", reduce="sum", rules={"w": "sparse"}),
    ),
    "accumulate": lambda: sparsejax.accumulate(CHAINS["dgc"](), 2, "replica", reduce="sum"),
    "skip_nonfinite": lambda: sparsejax.skip_nonfinite(CHAINS["dgc"](), "replica"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where"),
    [("dgc", "fsdp"), ("accumulate", "whole"), ("skip_nonfinite", "two")],
)
def test_nothing_is_lost_under_jit_and_residuals_lie_by_rank_and_shard(name, where):
    """Sums of all that was sent, and all that is held, are those of the gradients."""
    sizes, spec = MESHES[where]
    mesh, tx = helpers.grid(**sizes), CHAINS[name]()
    params = {"w": helpers.placed(np.zeros(SHAPE, np.float32), mesh, spec)}
    state = sparsejax.init(tx, params)
    step = jax.jit(tx.update)
    given, sent, found = np.zeros(SHAPE), np.zeros(SHAPE), []
    for seed in range(4):
        x = drawn(mesh, seed, density=0.2)
        given += x.sum(0)
        out, state = step({"w": helpers.partial_sums(x, mesh)}, state, params)
        sent += np.asarray(out["w"])
        found.append(np.asarray(out["w"]).any())
    assert step._cache_size() == 1
    held = sparsejax.residuals(state)["w"]
    np.testing.assert_array_equal(sent + np.asarray(held).sum(0), given)
    assert any(found)
    assert np.asarray(held).any()
    metrics = {key: float(value) for key, value in sparsejax.metrics(state).items()}
    if name == "dgc":
        norm = metrics["sparsify/residual_norm"]
        np.testing.assert_allclose(norm, np.linalg.norm(held), rtol=1e-5)
    if name in ("dgc", "accumulate"):
        # What comes first reduces over the other axes, and no other does.
        first = "sparsify" if name == "dgc" else "accumulate"
        fast = mesh.size // mesh.shape["replica"]
        times = 1 if any(spec) else 2
        inside = times * (fast - 1) / fast * x[0].nbytes
        assert metrics.pop(f"{first}/inside_bytes") == inside
        rest = [value for key, value in metrics.items() if "inside_bytes" in key]
        assert not any(rest)
    for leaf in jax.tree.leaves(jax.tree.map(jax.typeof, state)):
        if leaf.shape[1:] == SHAPE:
            assert leaf.sharding.spec.partitions == ("replica", *(spec or (None, None)))


@pytest.mark.parametrize("where", ["fsdp", *helpers.slow("two")])
def test_a_rank_is_clipped_at_the_norm_of_all_its_shards(where):
    sizes, spec = MESHES[where]
    mesh = helpers.grid(**sizes)
    clip = sparsejax.transforms.clip_by_rank(3.0, "replica")
    tx = optax.chain(clip, sparsejax.dense_sync("replica", reduce="sum"))
    x = drawn(mesh)
    params = {
        "w": helpers.placed(np.zeros(SHAPE, np.float32), mesh, spec),
        "b": helpers.placed(np.zeros(8), mesh, P()),
    }
    b = np.ones((mesh.size, 8), np.float32)
    with jax.set_mesh(mesh):
        state = tx.init(params)
    grads = {"w": helpers.partial_sums(x, mesh), "b": helpers.partial_sums(b, mesh)}
    out, _ = jax.jit(tx.update)(grads, state, params)
    ranks = mesh.shape["replica"]
    own = x.reshape(ranks, -1, *SHAPE).sum(1), b.reshape(ranks, -1, 8).sum(1)
    norms = np.sqrt(np.square(own[0]).sum((1, 2)) + np.square(own[1]).sum(1))
    scale = 3.0 * ranks**-0.5 / norms
    assert (scale < 1).all()
    np.testing.assert_allclose(out["w"], (scale[:, None, None] * own[0]).sum(0), atol=1e-5)
    np.testing.assert_allclose(out["b"], (scale[:, None] * own[1]).sum(0), rtol=1e-5)


BOTH = ("replica", "fsdp")


def test_parameters_are_cast_so_that_gradients_are_partial_sums():
    mesh = helpers.grid(replica=2, fsdp=2)
    x = helpers.placed(np.ones((8, 4), np.float32), mesh, P("fsdp", None))
    cast = sparsejax.local({"x": x}, BOTH)["x"]
    spec = jax.typeof(cast).sharding.spec
    assert (spec.partitions, spec.reduced) == ((None, None), frozenset(BOTH))
    kept = sparsejax.local(x, "replica")
    spec = jax.typeof(kept).sharding.spec
    assert (spec.partitions, spec.reduced) == (("fsdp", None), {"replica"})
    assert sparsejax.local(x) is x
    assert sparsejax.local(np.ones(3), "replica").sum() == 3
    with pytest.raises(errors.AxisError, match=r"no axis 'data'.*'replica', 'fsdp'"):
        sparsejax.local(x, "data")


@pytest.mark.parametrize("parts", [("model", "fsdp"), ("fsdp", "model")])
def test_a_gradient_that_is_summed_over_one_of_two_axes_is_scattered_or_refused(parts):
    """JAX shards a dimension by the first axis, and each piece by the next."""
    mesh, both = helpers.grid(replica=2, fsdp=2, model=2), ("replica", "fsdp")
    rng = np.random.default_rng(0)
    w = helpers.placed(
        rng.integers(-4, 5, (16, 8)).astype(np.float32), mesh, P(parts, None)
    )
    x = helpers.placed(
        rng.integers(-4, 5, (16, 16)).astype(np.float32), mesh, P(both, "model")
    )
    tx = sparsejax.zen_sync("replica", reduce="sum", rules={"w": "sparse"})
    state = sparsejax.init(tx, {"w": w})

    def loss(params, x):
        return jnp.sum(jnp.einsum("bi,io->bo", x, params["w"], out_sharding=P(both, None)))

    @jax.jit
    def step(params, state, x):
        grads = jax.grad(loss)(sparsejax.local(params, both), x)
        return tx.update(grads, state, params)[0]["w"]

    with jax.set_mesh(mesh):
        if parts[0] == "fsdp":
            with pytest.raises(
                errors.ArgumentError, match=r"Shard it over \('model', 'fsdp'"
            ):
                step({"w": w}, state, x)
        else:
            found = np.asarray(step({"w": w}, state, x))
            wanted = np.asarray(x).sum(0)[:, None] * np.ones((1, 8))
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_a_transformation_of_no_leaf_does_nothing():
    mesh = helpers.grid(replica=4, fsdp=2)
    params = {"w": helpers.placed(np.zeros(SHAPE, np.float32), mesh, P("fsdp", None))}
    own = sparsejax.zen_sync("replica", reduce="sum", rules={"w": "sparse"})
    tx = optax.multi_transform(
        {"a": own, "b": sparsejax.dense_sync("replica", reduce="sum")}, {"w": "a"}
    )
    x = drawn(mesh)
    made = sparsejax.init(tx, params, axis_name="replica")
    out, _ = jax.jit(tx.update)({"w": helpers.partial_sums(x, mesh)}, made, params)
    np.testing.assert_array_equal(np.asarray(out["w"]), x.sum(0))


def test_what_cannot_be_summed_under_jit_is_refused_by_name():
    sizes, spec = MESHES["fsdp"]
    mesh = helpers.grid(**sizes)
    x, params = drawn(mesh), {"w": helpers.placed(np.zeros(SHAPE, np.float32), mesh, spec)}
    grads = {"w": helpers.partial_sums(x, mesh)}
    make = functools.partial(sparsejax.zen_sync, rules={"w": "sparse"}, reduce="sum")
    tx = make("replica")
    state = sparsejax.init(tx, params)
    with pytest.raises(errors.AlreadySummedError, match=r"'w' is not unreduced over 'repl"):
        jax.jit(tx.update)(params, state, params)
    # A parameter on no mesh is no gradient's: `local` leaves it as it is.
    on_none = {"w": np.zeros(SHAPE, np.float32)}
    with pytest.raises(errors.AlreadySummedError, match=r"'w' is .*on no mesh.*device_put"):
        jax.jit(tx.update)(params, state, on_none)
    twice = optax.chain(tx, tx)
    with pytest.raises(errors.AlreadySummedError, match="another synchronization in this"):
        jax.eval_shape(twice.update, grads, (state, state), params)
    with pytest.raises(errors.ArgumentError, match=r"'w'.*update\(grads, opt_state, pa"):
        jax.jit(tx.update)(grads, state)
    with pytest.raises(errors.AxisError, match="no axis 'data'"):
        jax.jit(make("data").update)(grads, state, params)
    with pytest.raises(errors.AxisError, match=r"several axes.*such as 'replica'"):
        jax.jit(make().update)(grads, state, params)
    mean = make("replica", reduce="mean")
    with pytest.raises(errors.ArgumentError, match=r"reduce='mean'.*reduce='sum'"):
        jax.jit(mean.update)(grads, sparsejax.init(mean, params), params)
    with pytest.raises(errors.ArgumentError, match=r"given ids=.*Leave ids out"):
        jax.jit(tx.update)(grads, state, params, ids={"w": jnp.arange(3)})
    cast = sparsejax.local(params, mesh.axis_names)
    with pytest.raises(errors.ArgumentError, match=r"sparsejax.local returned for 'w'"):
        jax.jit(tx.update)(grads, state, cast)
    top = sparsejax.top_k(0.1, axis_name="replica", min_size=1)
    whole = {"w": helpers.placed(np.zeros(SHAPE, np.float32), mesh, P())}
    with pytest.raises(errors.StateError, match=r"sharded .*'fsdp'.*init\(tx, params\)"):
        jax.jit(top.update)(grads, top.init(params), whole)
    half = helpers.grid(replica=2, fsdp=2)
    of_two = top.init({"w": helpers.placed(np.zeros(SHAPE, np.float32), half, spec)})
    with pytest.raises(errors.StateError, match=r"made for 2 ranks, and there are 4"):
        jax.jit(top.update)(grads, jax.device_get(of_two), params)
    clip = sparsejax.transforms.clip_by_rank(1.0, "replica", model_axis="fsdp")
    with pytest.raises(errors.ArgumentError, match=r"model_axis='fsdp'.*Leave model_axis"):
        jax.jit(clip.update)(grads, clip.init(params), params)
    with pytest.raises(errors.ArgumentError, match="no parameter is on one whose axes are"):
        sparsejax.init(tx, {"w": np.zeros(SHAPE, np.float32)})
    with pytest.raises(errors.ArgumentError, match=r"that are traced.*tx\.init\(params\)"):
        jax.eval_shape(functools.partial(sparsejax.init, tx), params)


def test_parts_of_a_chain_that_name_different_axes_are_refused():
    mesh = helpers.grid(fsdp=2, replica=4)
    params = {"w": helpers.placed(np.zeros(SHAPE, np.float32), mesh, P("fsdp", None))}
    grads = {"w": helpers.partial_sums(drawn(mesh), mesh)}
    tx = sparsejax.zen_sync("replica", reduce="sum")
    mixed = optax.chain(sparsejax.top_k(0.1, axis_name="fsdp"), tx)
    with pytest.raises(errors.AxisError, match=r"axes, 'fsdp' and 'replica': give th"):
        sparsejax.init(mixed, params)
    guard = sparsejax.skip_nonfinite(tx)
    with pytest.raises(errors.AxisError, match=r"axis_name='fsdp'\), the same in all"):
        sparsejax.init(guard, params)
    guard = sparsejax.skip_nonfinite(tx, axis_name="fsdp")
    state = sparsejax.init(guard, params)
    with pytest.raises(errors.AlreadySummedError, match="skip_nonfinite, was given anot"):
        jax.jit(guard.update)(grads, state, params)


@pytest.mark.parametrize("spec", [P(), P("fsdp", None)])
def test_a_sum_over_the_fast_axis_is_taken_in_float32(spec):
    """In float16 each 1 that is added to 2048 is lost."""
    mesh = helpers.grid(replica=1, fsdp=8)
    params = {"w": helpers.placed(np.zeros((8, 8), np.float16), mesh, spec)}
    tx = sparsejax.dense_sync("replica", reduce="sum")
    x = np.ones((8, 8, 8), np.float16)
    x[0] = 2048
    state = sparsejax.init(tx, params)
    out, _ = jax.jit(tx.update)({"w": helpers.partial_sums(x, mesh)}, state, params)
    np.testing.assert_array_equal(out["w"], np.full((8, 8), 2056))


def test_parameters_that_are_another_tree_are_refused_by_name():
    mesh = helpers.grid(replica=4)
    whole = helpers.placed(np.zeros((8,), np.float32), mesh, P())
    params = {"w": whole, "frozen": whole}
    grads = {"w": helpers.partial_sums(np.ones((4, 8), np.float32), mesh), "frozen": None}
    tx = sparsejax.zen_sync("replica", reduce="sum")
    state = tx.init(params | {"frozen": None})
    with pytest.raises(errors.ArgumentError, match=r"its parameter must be None, too"):
        jax.jit(tx.update)(grads, state, params)
    out, _ = jax.jit(tx.update)(grads, state, params | {"frozen": None})
    np.testing.assert_array_equal(out["w"], np.full(8, 4.0))
