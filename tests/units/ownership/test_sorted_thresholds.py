"""Ranges that follow the data: exact at every step, balanced only where data stay."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import errors, schemes
from sparsejax.units.ownership.sorted_thresholds import SortedThresholds
from tests import helpers


N, SIZE = 4, 3001


@functools.cache
def stepper(every):
    scheme = schemes.BalancedParallelism(ownership=SortedThresholds(every=every))

    def run(state, x):
        done = helpers.call(scheme, x[0], state)
        return done.state, done.total, done.total[None], done.traffic

    step = helpers.shard_map(
        run,
        mesh=helpers.mesh_of(N),
        in_specs=(P(), P("data")),
        out_specs=(P(), P(), P("data"), P()),
    )
    return jax.jit(step), helpers.first_state(
        scheme, jax.ShapeDtypeStruct((SIZE,), np.float32), N
    )


def sets_near(start, rng, length=600, density=0.3):
    x = np.zeros((N, SIZE), np.float32)
    x[:, start : start + length] = rng.random((N, length)) < density
    return x


@pytest.mark.slow
def test_every_step_is_exact_and_thresholds_follow_every_other():
    step, state = stepper(every=2)
    rng = np.random.default_rng(0)
    for number, start in enumerate((0, 0, 1000, 1000, 2300, 2300)):
        before = np.asarray(state.starts)
        x = sets_near(start, rng)
        state, total, by_rank, _ = step(state, x)
        np.testing.assert_array_equal(total, x.sum(0))
        helpers.assert_same_on_all_ranks(by_rank)
        starts = np.asarray(state.starts)
        assert (np.diff(starts) >= 0).all()
        assert starts[0] == 0
        if number % 2:
            np.testing.assert_array_equal(starts, before)
        else:
            union = np.flatnonzero(x.any(0))
            cuts = np.searchsorted(union, starts[1:])
            np.testing.assert_allclose(np.diff([0, *cuts, len(union)]),
                                       len(union) / N, atol=1)  # fmt: skip


@pytest.mark.slow
def test_balance_holds_where_data_stay_and_is_lost_where_they_move():
    step, state = stepper(every=1)
    rng = np.random.default_rng(0)
    told = []
    for start in (0, 0, 2000):
        state, _, _, traffic = step(state, sets_near(start, rng))
        told.append(float(traffic.push.imbalance))
    # At first equal ranges, all in one of them; then cut to fit; then all in the last.
    assert told[0] > 3.5
    assert told[1] < 1.5
    assert told[2] > 3.5


@pytest.mark.parametrize("count", helpers.slow(0, 1, 2, 3))
def test_fewer_units_than_ranks_leave_ranges_empty(count):
    step, state = stepper(every=2)
    x = np.zeros((N, SIZE), np.float32)
    x[:, 1000 : 1000 + count] = 1
    for _ in range(4):
        state, total, _, _ = step(state, x)
        np.testing.assert_array_equal(total, x.sum(0))
        assert (np.diff(np.asarray(state.starts)) >= 0).all()


@pytest.mark.slow
def test_as_an_optimizers_state():
    scheme = schemes.BalancedParallelism(ownership=SortedThresholds(every=3))
    tx = sparsejax.sync(scheme, "data", reduce="sum", rules={"": "sparse"})
    params = {"x": np.zeros(SIZE, np.float32)}
    mesh = helpers.mesh_of(N)
    state = sparsejax.init(tx, params, mesh)

    def run(state, x):
        total, state = tx.update({"x": x[0]}, state)
        return state, total["x"]

    specs = sparsejax.state_specs(state)
    step = jax.jit(
        helpers.shard_map(
            run, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P())
        )
    )
    rng = np.random.default_rng(1)
    for start in (0, 500, 1500, 2000):
        x = sets_near(start, rng)
        state, total = step(state, x)
        np.testing.assert_array_equal(total, x.sum(0))


@pytest.mark.parametrize("every", [0, -1, 2.5])
def test_a_period_that_is_none_is_refused(every):
    with pytest.raises(errors.ArgumentError, match="every must be a positive int"):
        SortedThresholds(every=every)
