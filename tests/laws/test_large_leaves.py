"""Leaves of more elements than int32 numbers: what sends them whole takes them.

Nothing of that size is run. What numbers elements refuses them, and names them.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsejax
from sparsejax import errors, schemes
from sparsejax.schemes.base import MOST_UNITS
from tests import helpers


LARGE = jax.ShapeDtypeStruct((2**31,), jnp.bfloat16)


def traced(tx, params):
    """The shapes of the updates of a transformation on 8 ranks."""

    def step(params):
        grads = sparsejax.local(params, "data")
        return tx.update(grads, tx.init(params), params)[0]

    mesh = helpers.described("cpu", data=8)
    step = helpers.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())
    return jax.eval_shape(step, params)


WHOLE = {
    "dense": sparsejax.dense_sync("data"),
    "a rule": sparsejax.zen_sync("data", rules={"w": "dense"}),
    "rounds": sparsejax.local_steps(optax.sgd(0.1), every=2, axis_name="data"),
    "low rank": sparsejax.transforms.power_sgd_sync(2, "data"),
    "skipped": sparsejax.skip_nonfinite(sparsejax.dense_sync("data"), "data"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_sent_whole_may_have_any_size(name):
    shapes = traced(WHOLE[name], {"w": LARGE, "b": jax.ShapeDtypeStruct((3,), jnp.float32)})
    assert shapes["w"].shape == LARGE.shape


def selecting(make, **options):
    return optax.chain(make(0.01, axis_name="data", **options), sparsejax.zen_sync("data"))


QUARTER = jax.ShapeDtypeStruct((2**29,), jnp.float32)


@pytest.mark.parametrize(
    ("tx", "leaf", "match"),
    [
        (sparsejax.zen_sync("data"), LARGE, "2,147,483,648 units is too large.*'dense'"),
        (sparsejax.sync(schemes.OmniReduce(), "data"), LARGE, "units is too large"),
        (selecting(sparsejax.top_k), LARGE, "leaf 'w' has 2,147,483,648 .*compress="),
        (
            selecting(sparsejax.dgc),
            jax.ShapeDtypeStruct((MOST_UNITS + 1,), "float32"),
            "'w'",
        ),
    ],
)
def test_what_numbers_elements_refuses_more_than_it_can(tx, leaf, match):
    with pytest.raises(errors.ArgumentError, match=match):
        traced(tx, {"w": leaf})


def test_one_threshold_for_all_leaves_has_room_for_their_sum():
    params = {name: QUARTER for name in "abcd"}
    traced(selecting(sparsejax.top_k), params)
    with pytest.raises(errors.ArgumentError, match=r"global_=True .* of 2,147,483,648 ele"):
        traced(selecting(sparsejax.top_k, global_=True), params)


def test_a_profile_and_a_lookup_name_what_is_too_large():
    mesh = helpers.described("cpu", data=8)
    on_ranks = lambda f, specs: helpers.shard_map(
        f, mesh=mesh, in_specs=specs, out_specs=P()
    )
    profile = lambda w: sparsejax.profile({"w": sparsejax.local(w)})["w"].units
    with pytest.raises(errors.ArgumentError, match="leaf 'w': 2,147,483,648 units"):
        jax.eval_shape(on_ranks(profile, P()), LARGE)
    over = NamedSharding(mesh, P(None, "data"))
    value = jax.ShapeDtypeStruct((2**31, 8), jnp.bfloat16, sharding=over)
    table = sparsejax.ColumnTable(value, 8, "data")
    read = lambda table: sparsejax.column_lookup(table, jnp.zeros(3, jnp.int32))
    specs = (sparsejax.state_specs(table),)
    with pytest.raises(errors.ArgumentError, match="2,147,483,648 units are too many"):
        jax.eval_shape(on_ranks(read, specs), table)


def test_a_parameter_sharded_over_the_ranks_may_have_gigabytes():
    """The bytes of a dense reduce-scatter exceed int32."""
    mesh, shape = helpers.grid(data=8), (5 * 2**20, 128)
    tx = sparsejax.zen_sync("data", reduce="sum")
    over = NamedSharding(mesh, P("data"))

    def step(params, batch):
        loss = lambda params: jnp.sum(batch @ params["w"])
        grads = jax.grad(loss)(sparsejax.local(params, "data"))
        return tx.update(grads, tx.init(params), params)[0]

    with jax.set_mesh(mesh):
        params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=over)}
        batch = jax.ShapeDtypeStruct((64, shape[0]), jnp.float32, sharding=over)
        (updates,) = jax.tree.leaves(jax.eval_shape(jax.jit(step), params, batch))
    assert updates.shape == shape


@pytest.mark.parametrize("shape", [LARGE.shape, (10**8, 128)])
def test_advice_is_none_that_is_refused(shape):
    """Neither zen_sync() nor dgc() in front of it can number the elements."""
    params = {"table": jax.ShapeDtypeStruct(shape, jnp.float32)}
    network = sparsejax.Network(gbit_per_s=25, latency_us=20)
    found = sparsejax.explain(sparsejax.dense_sync(), params, ranks=16, network=network)
    assert "keep sparsejax.dense_sync()" in found.advice
