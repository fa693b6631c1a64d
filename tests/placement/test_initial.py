"""States wherever a framework makes them, and targets to restore them into."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.errors import ArgumentError, AxisError, StateError
from tests import helpers


PARAMS = {"table": jnp.zeros((60, 4)), "bias": jnp.zeros(3)}
N = 2


def chain():
    sparsifier = sparsejax.top_k(0.1, min_size=1)
    return optax.chain(sparsifier, sparsejax.zen_sync(), optax.adam(1e-3))


def shapes(tree):
    return [x.shape for x in jax.tree.leaves(tree)]


def places(tree):
    """Of each leaf the shape, the dtype and the part of it on each device."""
    at = lambda x: x.sharding.devices_indices_map(x.shape)
    return [(x.shape, x.dtype, at(x)) for x in jax.tree.leaves(tree)]


def test_bind_makes_the_state_that_init_makes():
    mesh = helpers.mesh_of(N)
    bound, expected = sparsejax.bind(chain(), mesh), sparsejax.init(chain(), PARAMS, mesh)
    state = bound.init(PARAMS)
    assert places(state) == places(expected)
    assert shapes(jax.eval_shape(bound.init, PARAMS)) == shapes(expected)
    with pytest.raises(StateError, match=r"sparsejax\.bind\(tx, mesh\)"):
        chain().init(PARAMS)


WRAPPED = {
    "alone": lambda tx: tx,
    "masked": lambda tx: optax.masked(tx, {"table": True, "bias": False}),
    "partition": lambda tx: optax.partition(
        {"rows": tx, "rest": sparsejax.dense_sync()}, {"table": "rows", "bias": "rest"}
    ),
    "freeze": lambda tx: optax.transforms.selective_transform(
        tx, freeze_mask={"table": False, "bias": True}
    ),
    "inject": lambda tx: optax.chain(tx, optax.inject_hyperparams(optax.sgd)(0.1)),
    "accumulate": lambda tx: sparsejax.accumulate(tx, every=2),
    "warm up and skip": lambda tx: sparsejax.skip_nonfinite(sparsejax.warm_up(tx, 2)),
}


@pytest.mark.parametrize(
    "name", helpers.mostly_slow(WRAPPED, "alone", "partition", "inject")
)
def test_wrappers_of_optax_keep_a_state_with_specs(name):
    """The state goes through a step in shard_map, by its specs, and keeps its types."""
    mesh = helpers.mesh_of(N)
    tx = sparsejax.bind(WRAPPED[name](chain()), mesh)
    state = tx.init(PARAMS)
    specs = sparsejax.state_specs(state)
    assert P("data") in jax.tree.leaves(specs)

    def on_rank(params, state):
        return tx.update(sparsejax.local(params), state, params)[1]

    step = helpers.shard_map(on_rank, mesh=mesh, in_specs=(P(), specs), out_specs=specs)
    after = jax.eval_shape(step, PARAMS, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert shapes(after) == shapes(state)


@pytest.mark.parametrize("ranks", [None, 3])
def test_a_target_is_like_the_state_of_so_many_ranks(ranks):
    mesh = helpers.mesh_of(N)
    target = sparsejax.abstract_state(chain(), PARAMS, mesh, ranks=ranks)
    made = sparsejax.init(chain(), PARAMS, helpers.mesh_of(ranks or N))
    assert jax.tree.structure(target) == jax.tree.structure(made)
    assert shapes(target) == shapes(made)
    if ranks is None:
        assert places(target) == places(made)
    else:
        assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(target))


def test_a_target_for_a_pair_of_axes():
    mesh = helpers.grid(hosts=2, chips=2)
    params, pair = {"table": PARAMS["table"]}, ("hosts", "chips")
    sparsifier = sparsejax.top_k(0.1, min_size=1, axis_name=pair)
    tx = optax.chain(sparsifier, sparsejax.dense_sync(pair))
    target = sparsejax.abstract_state(tx, params, mesh, pair, ranks=8)
    assert sparsejax.residuals(target)["table"].shape == (8, 60, 4)
    with pytest.raises(AxisError, match=r"ranks=5 .*multiple of the 2"):
        sparsejax.abstract_state(tx, params, mesh, pair, ranks=5)


def test_arrays_in_containers_of_another_framework_say_where_they_are():
    mesh = helpers.mesh_of(N)
    state = sparsejax.bind(chain(), mesh).init(PARAMS)
    flat = dict(enumerate(jax.tree.leaves(state)))
    specs = sparsejax.state_specs(flat)
    known = jax.tree.leaves(sparsejax.state_specs(state))
    short = lambda spec: tuple(spec)[: sum(part is not None for part in spec)]
    assert [short(spec) for spec in specs.values()] == [short(spec) for spec in known]


def test_a_state_in_place_is_compiled_for_once():
    mesh = helpers.mesh_of(N)
    tx = optax.chain(sparsejax.dense_sync(), optax.adam(1e-3))
    params = jax.device_put(PARAMS, jax.NamedSharding(mesh, P()))
    state = sparsejax.bind(tx, mesh).init(params)
    specs = sparsejax.state_specs(state)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs))
    def step(params, state):
        updates, state = tx.update(sparsejax.local(params), state, params)
        return optax.apply_updates(params, updates), state

    with helpers.compilations() as compiled:
        for _ in range(2):
            params, state = step(params, state)
    assert len(compiled) == 1


def test_a_state_is_the_same_where_its_mesh_is_set():
    mesh = jax.make_mesh((2, 2), ("replica", "fsdp"), devices=jax.devices()[:4])
    tx = optax.chain(sparsejax.zen_sync("replica"), optax.adam(1e-3))
    params = jax.device_put({"table": PARAMS["table"]}, jax.NamedSharding(mesh, P("fsdp")))
    without = places(sparsejax.init(tx, params, mesh, "replica"))
    with jax.set_mesh(mesh):
        assert places(sparsejax.init(tx, params, mesh, "replica")) == without


def test_arguments_in_another_order_are_named():
    mesh = helpers.mesh_of(N)
    with pytest.raises(ArgumentError, match=r"tx must be an optax .* got a Mesh"):
        sparsejax.bind(mesh, sparsejax.zen_sync())
    with pytest.raises(ArgumentError, match=r"got a function: call it"):
        sparsejax.bind(sparsejax.zen_sync, mesh)
