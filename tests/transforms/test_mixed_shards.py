"""Leaves of which some are sharded and some are not: what is chosen from them together."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors
from tests import helpers


@pytest.mark.slow
def test_what_a_scheme_chooses_of_a_replicated_leaf_is_the_same_on_all_shards():
    """It shares no bucket with one that is sharded, of which devices have other parts."""
    mesh = helpers.grid(replica=4, fsdp=2)
    tx = sparsejax.spardl_sync(0.1, "replica", reduce="sum", rules={".": "sparse"})
    params, given = mixed(mesh)
    given["sharded"][:, :32] *= 10
    state = sparsejax.init(tx, params)
    grads = {key: helpers.partial_sums(x, mesh) for key, x in given.items()}
    out, state = jax.jit(tx.update)(grads, state, params)
    first, *others = [np.asarray(x.data) for x in out["whole"].addressable_shards]
    assert first.any()
    for other in others:
        np.testing.assert_array_equal(other, first)
    for key, held in sparsejax.residuals(state).items():
        total = np.asarray(out[key]) + np.asarray(held).sum(0)
        np.testing.assert_allclose(total, given[key].sum(0), atol=1e-4)


MIXED = {"sharded": ((64, 32), P("fsdp", None)), "whole": ((33, 17), P())}


def mixed(mesh):
    """Parameters, one of them sharded, and partial sums of theirs."""
    rng = np.random.default_rng(0)
    params, given = {}, {}
    for key, (shape, spec) in MIXED.items():
        params[key] = helpers.placed(np.zeros(shape, np.float32), mesh, spec)
        given[key] = rng.standard_normal((mesh.size, *shape), np.float32)
    return params, given


def test_one_threshold_of_leaves_that_are_not_sharded_alike_is_refused():
    """Of the leaf that is replicated each device would choose others."""
    mesh = helpers.grid(replica=2, fsdp=2)
    params, _ = mixed(mesh)
    top = sparsejax.top_k(0.1, axis_name="replica", min_size=10, global_=True)
    tx = optax.chain(top, sparsejax.zen_sync("replica", reduce="sum"))
    for init in (functools.partial(sparsejax.init, tx), tx.init):
        with pytest.raises(errors.ArgumentError, match=r"Under jit.* leave global_ out"):
            init(params)


@pytest.mark.slow
def test_without_types_a_scheme_chooses_from_each_leaf_alone():
    """In a `shard_map` of one's own without checking nothing tells what is sharded."""
    mesh = helpers.grid(replica=4, fsdp=2)
    tx = sparsejax.ok_topk_sync(0.1, "replica", reduce="sum", rules={".": "sparse"})
    specs = {key: spec for key, (_, spec) in MIXED.items()}
    params = {key: np.zeros(shape, np.float32) for key, (shape, _) in MIXED.items()}
    made_for = {"param_specs": specs, "check_vma": False}
    state = sparsejax.init(tx, params, mesh, "replica", **made_for)
    state_specs = sparsejax.state_specs(state, params, specs)
    step = jax.shard_map(
        lambda x, state: tx.update({key: leaf[0] for key, leaf in x.items()}, state),
        mesh=mesh,
        in_specs=({key: P("replica", *spec) for key, spec in specs.items()}, state_specs),
        out_specs=(specs, state_specs),
        check_vma=False,
    )
    rng = np.random.default_rng(0)
    given = {}
    for key, (shape, spec) in MIXED.items():
        x = rng.standard_normal((4, *shape), np.float32)
        x[:, : shape[0] // 2] *= 10 if key == "sharded" else 1
        given[key] = helpers.placed(x, mesh, P("replica", *spec))
    out, _ = jax.jit(step)(given, state)
    first, *others = [np.asarray(x.data) for x in out["whole"].addressable_shards]
    assert first.any()
    for other in others:
        np.testing.assert_array_equal(other, first)
