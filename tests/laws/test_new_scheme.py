"""A new scheme is one file of about thirty lines: it obeys the laws with no other change.

CONTRIBUTING.md shows how; this is the scheme that it begins.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import schemes
from sparsejax.schemes import base, forecast, or_dense
from sparsejax.transforms.buckets import ByRules
from sparsejax.units import dense
from sparsejax.wire import collectives
from tests import helpers


@dataclasses.dataclass(frozen=True)
class RingOfSums(base.Scheme):
    """Passes dense arrays around a ring; on the wire: n - 1 permutes of the array."""

    is_dense = True

    def __call__(self, x, state, wire):
        arrays, sent = [x.dense()], 0.0
        ahead = tuple((rank, (rank + 1) % wire.ranks) for rank in range(wire.ranks))
        for _ in range(wire.ranks - 1):
            received, cost = wire.permute(arrays[-1], ahead)
            arrays.append(received)
            sent += cost
        # Array i is that of the rank i behind. All ranks add in the order of the ranks.
        order = (wire.rank - jnp.arange(wire.ranks)) % wire.ranks
        by_rank = jnp.stack(arrays)[order]
        total = wire.assume_same(jnp.sum(by_rank, axis=0))
        push = base.stage(sent, sent, wire.ranks - 1)
        whole = wire.dense_bytes(x.size, x.dtype)
        traffic = base.traffic(push, base.stage(), dense=whole)
        return base.Reduced(total, None, state, traffic)


@dataclasses.dataclass(frozen=True)
class Halved(base.LossyScheme):
    """Leaves out a half of each number."""

    is_dense = True

    def __call__(self, x, state, wire):
        done = RingOfSums()(dense.Dense(x.dense() / 2), (), wire)
        return done._replace(left=x.dense() / 2, state=state)


@pytest.mark.parametrize(("new", "is_kept"), [(RingOfSums(), True), (Halved(), False)])
def test_a_dense_scheme_is_kept_where_a_dense_sum_is_asked_for_unless_it_is_lossy(
    new, is_kept
):
    wire, x = collectives.Wire("data"), dense.Dense(jnp.ones(1 << 17))
    run = lambda: or_dense.suited(new, x, "w", wire, dense=True)
    kept = []
    helpers.run_ranks(lambda x: kept.append(run()) or x, np.ones((2, 1)), 2)
    assert kept == [new if is_kept else schemes.AllReduce()]


def test_a_dense_scheme_is_kept_on_tpus_and_sends_large_leaves_one_by_one():
    leaves = [jnp.zeros(1 << 17), jnp.zeros(1 << 17)]
    buckets = lambda scheme: ByRules(scheme, {"": "sparse"}).buckets(["a", "b"], leaves)
    with helpers.traced_for("tpu"):
        for scheme, refused, count in ((RingOfSums(), False, 2), (schemes.Zen(), True, 1)):
            assert or_dense.refuses_numbers(scheme, True, 2, False) == refused
            assert len(buckets(scheme)) == count


def test_its_total_is_the_sum_and_replicas_are_equal():
    n = 3
    x = helpers.gradients(n, 1000, 0.1)
    total = helpers.run_ranks(lambda x: helpers.call(RingOfSums(), x, ()).total, x, n)
    np.testing.assert_allclose(total[0], x.astype(np.float64).sum(0), rtol=1e-6, atol=1e-6)
    helpers.assert_same_on_all_ranks(total)


def test_it_is_a_transformation_with_metrics():
    tx = sparsejax.sync(RingOfSums(), rules={"": "sparse"})
    grads = np.arange(6, dtype=np.float32).reshape(2, 3)

    def step(x):
        updates, state = tx.update({"w": x}, tx.init(helpers.parameters({"w": x})))
        return updates["w"], sparsejax.metrics(state)["sync/wire_bytes"]

    updates, sent = helpers.run_ranks(step, grads, 2)
    np.testing.assert_array_equal(updates, np.broadcast_to(grads.mean(0), (2, 3)))
    assert sent[0] == 12


def test_it_is_given_whole_tables_where_gradients_are_rows():
    """It says nothing of lists of rows, and sums arrays all the same."""
    tx = sparsejax.sync(RingOfSums(), rules={"": "sparse"})
    table = forecast.Load(2, 5, 2, "float32", (3.0, 5.0), room=3, listed=True)
    assert RingOfSums().forecast(table) == table.all_reduce()

    def step(ids):
        grads = {"table": sparsejax.RowGrads(ids, jnp.ones((3, 2)) + ids[:, None], (5, 2))}
        grads = sparsejax.local(grads, "data")
        return tx.update(grads, tx.init({"table": jnp.zeros((5, 2))}))[0]["table"]

    ids = np.array([[1, 4, 1], [5, 0, 4]], np.int32)  # 5 is no row
    totals = helpers.run_ranks(step, ids, 2)
    want = np.zeros((5, 2))
    np.add.at(want, [1, 4, 1, 0, 4], np.array([2, 5, 2, 1, 5])[:, None])
    np.testing.assert_array_equal(totals, np.broadcast_to(want / 2, (2, 5, 2)))
