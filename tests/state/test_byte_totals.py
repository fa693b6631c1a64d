"""Running totals: exact integers, whatever happens around the exchange."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.schemes import base
from sparsejax.state.byte_totals import Totals
from tests import helpers


def traffic_of(wire, payload, dense):
    return base.traffic(base.stage(wire, payload), base.stage(), dense=dense)


def test_totals_are_exact_for_ever():
    """Many large buckets over many steps, against Python's integers."""
    rng = np.random.default_rng(0)
    sizes = (2.0 ** rng.uniform(0, 38, (40, 600, 3))).astype(np.float32).round()
    sizes[0] = 2**24 - 1  # everything carries
    program = jax.jit(
        lambda totals, x: totals.plus(
            [traffic_of(*(row[i] for i in range(3))) for row in list(x)]
        )
    )
    totals = Totals.zero()
    totals = Totals(totals.counts.at[4:].set(2**24 - 1))
    exact = [2**24 - 1] * 3
    for step in sizes[:, :30]:
        totals = program(totals, step)
        exact = [
            a + sum(int(x) for x in column) for a, column in zip(exact, step.T, strict=True)
        ]
    wide = jax.jit(lambda totals, x: totals.plus([traffic_of(*x)] * 300))
    for _ in range(3):
        totals = wide(totals, jnp.float32([2**24 - 1] * 3))
        exact = [a + 300 * (2**24 - 1) for a in exact]
    for i, value in enumerate(exact):
        assert int(totals.high[i]) * 2**24 + int(totals.low[i]) == value
        assert int(totals.low[i]) < 2**24
    numbers = totals.numbers()
    assert int(numbers["exchanges"]) == 43
    assert numbers["total_wire_bytes"] == exact[0] > 2**40
    assert numbers["total_payload_bytes"] == exact[1]
    assert numbers["total_dense_bytes"] == exact[2]


@pytest.mark.parametrize(("every", "warm"), [(1, 0), *helpers.slow((3, 3))])
def test_they_add_up_what_each_exchange_sent(every, warm):
    tx = sparsejax.sync(sparsejax.schemes.AGSparse(), rules={"w": "sparse"})
    tx = sparsejax.accumulate(sparsejax.warm_up(tx, warm // every), every)
    x = np.zeros((2, 9, 4096), np.float32)
    x[:, :, ::64] = 1
    x[:, 3:, ::16] = 1
    grads = {"w": x, "bias": np.ones((2, 9, 7), np.float32)}
    run = helpers.ranks(2)(tx, grads, sparsejax.metrics)
    now = {key.split("/")[-1]: v[0] for key, v in run.seen.items() if key.count("/") == 1}
    at = slice(every - 1, None, every)
    for name in ("wire_bytes", "payload_bytes", "dense_bytes"):
        np.testing.assert_array_equal(now[f"total_{name}"][at], now[name][at].cumsum())
    np.testing.assert_array_equal(now["exchanges"], (np.arange(9) + 1) // every)
    assert 0 < now["total_wire_bytes"][-1] < now["total_dense_bytes"][-1]


def test_a_state_keeps_them_on_other_ranks():
    params = {"w": jnp.zeros(4096)}
    tx = sparsejax.zen_sync(rules={"w": "sparse"})
    old, new = (sparsejax.init(tx, params, helpers.mesh_of(n)) for n in (4, 2))
    totals = Totals(jnp.uint32([5, 0, 1, 2, 7, 7, 7]))
    old = old._replace(inner=old.inner._replace(totals=totals))
    moved = sparsejax.metrics(sparsejax.resized(old, like=new))
    assert int(moved["sync/exchanges"]) == 5
    assert moved["sync/total_dense_bytes"] == 2 * 2**24 + 7


@pytest.mark.parametrize(
    ("dtype", "every"), [("float64", 1), *helpers.slow(("float32", 2))]
)
def test_a_state_keeps_its_types_where_numbers_have_64_bits(every, dtype):
    """Else a wrapper's two sides differ, and each step is compiled once more."""
    with jax.enable_x64(True):
        params = {"w": jnp.zeros((300, 256), dtype)}
        tx = sparsejax.accumulate(optax.chain(sparsejax.zen_sync(), optax.sgd(0.1)), every)
        mesh = helpers.mesh_of(2)
        state = sparsejax.init(tx, params, mesh)
        specs = sparsejax.state_specs(state)
        step = lambda grads, state: tx.update(sparsejax.local(grads, "data"), state)[1]
        step = helpers.shard_map(step, mesh=mesh, in_specs=(P(), specs), out_specs=specs)
        after = jax.eval_shape(step, params, state)
        types = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
        assert types(after) == types(state)


def test_an_exchange_of_no_leaves_is_one_and_sends_nothing():
    """As where all leaves are tables that ranks share out."""
    before = Totals(jnp.arange(7, dtype=jnp.uint32))
    np.testing.assert_array_equal(before.plus([]).counts, [1, 1, 2, 3, 4, 5, 6])
