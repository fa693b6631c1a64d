"""Gradients stacked by replica: on meshes whose axes are Auto, and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsejax
from sparsejax import errors
from sparsejax.transforms import PerReplica
from tests import helpers


ROWS, WIDTH, CLASSES, BATCH, LENGTH = 2048, 32, 64, 16, 8


SPECS = {
    "sharded": {"embedding": P("fsdp", None), "out": P(None, "fsdp"), "bias": P()},
    "replicated": {"embedding": P(), "out": P(), "bias": P()},
    "zero": {
        "embedding": P(("fsdp", "replica"), None),
        "out": P("replica", "fsdp"),
        "bias": P(),
    },
}


def model(mesh, specs):
    rng = np.random.default_rng(0)
    draw = lambda *shape: (0.1 * rng.standard_normal(shape)).astype(np.float32)
    shapes = {"embedding": (ROWS, WIDTH), "out": (WIDTH, CLASSES), "bias": (CLASSES,)}
    return {key: helpers.placed(draw(*shapes[key]), mesh, specs[key]) for key in shapes}


def batch_of(mesh):
    rng = np.random.default_rng(1)
    ids = (rng.zipf(1.3, (BATCH, LENGTH)) % ROWS).astype(np.int32)
    labels = rng.integers(0, CLASSES, (BATCH, LENGTH)).astype(np.int32)
    return [helpers.placed(x, mesh, P(("replica", "fsdp"))) for x in (ids, labels)]


def loss_fn(params, ids, labels):
    x = jnp.tanh(params["embedding"][ids]) @ params["out"] + params["bias"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(x), labels[..., None], -1)
    return -jnp.mean(picked)


def run(sync, specs, steps=4):
    """Parameters, their optimizer's state and losses after some steps.

    Without a synchronization gradients are those of the whole batch.
    """
    mesh = helpers.auto(helpers.grid(replica=4, fsdp=2))
    params, tx = model(mesh, specs), optax.chain(sync or optax.identity(), optax.adam(1e-2))
    batch, value_and_grad, losses = batch_of(mesh), jax.value_and_grad(loss_fn), []
    if sync is not None:
        value_and_grad = sparsejax.per_replica(value_and_grad, "replica", specs)

    @jax.jit
    def step(params, state, *batch):
        loss, grads = value_and_grad(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss.mean()

    with jax.set_mesh(mesh):
        state = tx.init(params) if sync is None else sparsejax.init(tx, params)
        for _ in range(steps):
            params, state, loss = step(params, state, *batch)
            losses.append(float(loss))
    return params, state, losses


SYNCS = {
    "zen": lambda: sparsejax.zen_sync("replica", rules={"embedding": "sparse"}),
    "dense": lambda: sparsejax.dense_sync("replica"),
    "guarded": lambda: sparsejax.skip_nonfinite(
        sparsejax.zen_sync("replica", rules={"embedding": "sparse"}), "replica"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sync", "name"),
    [("dense", "replicated"), *helpers.slow(("zen", "zero"), ("guarded", "sharded"))],
)
def test_a_model_trains_on_auto_axes_as_by_dense_sums(sync, name):
    params, state, losses = run(SYNCS[sync](), SPECS[name])
    wanted, _, of_dense = run(None, SPECS[name])
    np.testing.assert_allclose(losses, of_dense, rtol=1e-6)
    for key, value in params.items():
        np.testing.assert_allclose(value, wanted[key], atol=1e-5)
        lies = NamedSharding(value.sharding.mesh, SPECS[name][key])
        assert value.sharding.is_equivalent_to(lies, value.ndim)
        moments = optax.tree.get(state, "mu")[key]
        assert moments.sharding.is_equivalent_to(value.sharding, value.ndim)
    if sync == "zen":
        found = sparsejax.metrics(state)
        sent = float(found["sync/embedding/wire_bytes"])
        assert sent < 0.25 * float(found["sync/embedding/dense_bytes"])


@pytest.mark.slow
def test_what_a_sparsifier_leaves_out_is_kept_by_replica():
    chain = optax.chain(
        sparsejax.dgc(0.1, axis_name="replica", min_size=1000),
        sparsejax.zen_sync("replica", reduce="sum"),
    )
    mesh, specs = helpers.auto(helpers.grid(replica=4, fsdp=2)), SPECS["sharded"]
    rng = np.random.default_rng(0)
    given = {
        key: rng.integers(-9, 10, (4, *value.shape)).astype(np.float32)
        for key, value in model(mesh, specs).items()
    }
    with jax.set_mesh(mesh):
        params = model(mesh, specs)
        state = sparsejax.init(chain, params)
        place = lambda key, x: helpers.placed(x, mesh, P("replica", *specs[key]))
        nodes = {
            key: PerReplica(place(key, x), "replica", specs[key])
            for key, x in given.items()
        }
        out, state = jax.jit(chain.update)(nodes, state, params)
    held = sparsejax.residuals(state)
    for key, value in given.items():
        total = np.asarray(out[key]) + np.asarray(held[key]).sum(0)
        np.testing.assert_array_equal(total, value.sum(0))
    assert np.asarray(held["embedding"]).any()


def test_gradients_that_are_stacked_by_hand_are_averaged():
    """As `jax.vmap` with spmd_axis_name stacks them; on an explicit mesh, too."""
    for mesh in (helpers.auto(helpers.grid(replica=4)), helpers.grid(replica=4)):
        x = np.arange(4 * 64, dtype=np.float32).reshape(4, 8, 8)
        params = {"w": helpers.placed(np.zeros((8, 8), np.float32), mesh, P())}
        tx = sparsejax.zen_sync("replica", rules={"w": "sparse"})
        with jax.set_mesh(mesh):
            state = sparsejax.init(tx, params)
            grads = {"w": PerReplica(helpers.placed(x, mesh, P("replica")), "replica")}
            out, _ = jax.jit(tx.update)(grads, state, params)
        np.testing.assert_array_equal(np.asarray(out["w"]), x.mean(0))


def test_what_does_not_fit_is_refused_by_name():
    mesh = helpers.auto(helpers.grid(replica=4, fsdp=2))
    params = {"w": helpers.placed(np.zeros((8, 8), np.float32), mesh, P())}
    tx = sparsejax.zen_sync("replica")
    x = jnp.ones((4, 8, 8))
    with jax.set_mesh(mesh):
        state = sparsejax.init(tx, params)
        step = lambda *node: jax.jit(tx.update)({"w": PerReplica(*node)}, state, params)
        with pytest.raises(
            errors.ArgumentError, match=r"'w' has the shape \[8, 8\].*4 fir"
        ):
            step(x[0], "replica")
        with pytest.raises(errors.AxisError, match=r"\('replica',\).*stacked over 'fsdp'"):
            step(x[:2], "fsdp")
        with pytest.raises(errors.AxisError, match="no axis 'data'"):
            step(x, "data")
        with pytest.raises(errors.ArgumentError, match="spec must be the PartitionSpec"):
            step(x, "replica", "fsdp")
        with pytest.raises(errors.StateError, match=r"sparsejax.init\(tx, params\)"):
            step(x, "replica", P("fsdp"))
        for wrong in (P("data"), P(None, None, "fsdp"), P(("replica", "fsdp", "fsdp"))):
            with pytest.raises(errors.ArgumentError, match=r"'w' is stacked with spec="):
                step(x, "replica", wrong)
        with pytest.raises(errors.AxisError, match=r"Auto axes.*sparsejax\.per_replica"):
            jax.jit(tx.update)(params, state, params)
        other = sparsejax.per_replica(jax.grad(lambda w: jnp.sum(w["w"])), "replica")
        with pytest.raises(errors.ArgumentError, match=r"returns \(value, gradients\)"):
            jax.jit(other)(params)
    value_and_grad = jax.value_and_grad(lambda w: jnp.sum(w["w"]))
    with pytest.raises(errors.AxisError, match=r"found no mesh.*jax\.set_mesh"):
        sparsejax.per_replica(value_and_grad, "replica")(params)
    grads = {"w": PerReplica(x, "replica")}
    with pytest.raises(errors.AxisError, match=r"found no mesh.*jax\.set_mesh"):
        tx.update(grads, state, params)
    inside = sparsejax.per_replica(value_and_grad, "data")
    nested = helpers.shard_map(inside, mesh=helpers.mesh_of(4), in_specs=P(), out_specs=P())
    with pytest.raises(errors.AxisError, match="makes a shard_map of its own"):
        jax.eval_shape(nested, {"w": jnp.ones((8, 8))})

    kinds = (AxisType.Explicit, AxisType.Auto)
    mixed = jax.make_mesh((4, 2), ("replica", "fsdp"), axis_types=kinds)
    with jax.set_mesh(mixed):
        grads = {"w": helpers.placed(np.ones((8, 8), np.float32), mixed, P())}
        with pytest.raises(errors.AxisError, match=r"'fsdp' is Auto.*per_replica"):
            jax.jit(tx.update)(grads, tx.init({"w": jnp.ones((8, 8))}), grads)
