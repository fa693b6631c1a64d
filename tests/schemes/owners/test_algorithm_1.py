"""Owners found by Algorithm 1: every unit in one place, or counted as left over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import errors, schemes
from sparsejax.units.dense import Dense
from sparsejax.units.entries import of_tensors
from sparsejax.units.ownership import MurmurHash
from sparsejax.units.sparse_tensor import SparseTensor
from tests import helpers


SIZE, RANKS = 3001, 3
RULE = MurmurHash(seed=5, memory=0.1)
LAYOUT = RULE.over(SIZE, RANKS)


def units_of(x, kind):
    """x as numbers, as rows, or by its entries."""
    if kind == "rows":
        return Dense(jnp.stack([x, -x], axis=1))
    if kind == "entries":
        there = jnp.nonzero(x, size=SIZE, fill_value=SIZE)[0].astype(jnp.int32)
        values = x.at[there].get(mode="fill", fill_value=0)
        return of_tensors([SparseTensor(there, values, (SIZE,))])
    return Dense(x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numbers", "rows", "entries"])
def test_every_unit_is_in_one_place_of_its_owner_or_left_over(kind):
    @jax.jit
    def fill(x):
        x = units_of(x, kind)
        return LAYOUT.memory.fill(x, x.present())

    rng = np.random.default_rng(3)
    ends = set()
    # None, up to the share that there is room for and a fifth more, and all.
    for density in (0.0, 0.01, 0.1, 0.12, 1.0):
        there = np.flatnonzero(rng.random(SIZE) < density)
        x = np.zeros(SIZE, np.float32)
        x[there] = rng.random(len(there)) + 1
        filled = fill(x)
        units = np.asarray(filled.units)
        np.testing.assert_array_equal(helpers.unpacked(filled.places.words), units >= 0)
        parts, _ = LAYOUT.assign(jnp.asarray(units[units >= 0]))
        np.testing.assert_array_equal(parts, np.nonzero(units >= 0)[0])
        found = np.sort(units[units >= 0])
        assert len(found) == len(np.unique(found))
        assert np.isin(found, there).all()
        assert bool(filled.left) == (len(found) < len(there))
        assert density > 0.12 or not filled.left
        if not filled.left:
            np.testing.assert_array_equal(found, there)
        ends.add(bool(filled.left))
    assert ends == {False, True}


@pytest.mark.slow
def test_entries_travel_as_coo_and_all_goes_densely_where_any_found_no_place():
    """Of numbers; of rows, for GPUs: `tests/wire/test_at_once.py`."""
    scheme = schemes.BalancedParallelism(ownership=RULE)

    def run(x):
        reduced = helpers.call(scheme, x)
        return reduced.total, reduced.traffic

    summed = helpers.ranked(run, RANKS)
    of_one_owner = np.asarray(LAYOUT.assign(jnp.arange(SIZE))[0]) == 1
    for x, is_dense in [
        (helpers.gradients(RANKS, SIZE, 0.01), False),
        (helpers.gradients(RANKS, SIZE, 0.1), False),
        (helpers.gradients(RANKS, SIZE, [0.01, 0.3, 0.0]), True),
        (np.where(of_one_owner, helpers.gradients(RANKS, SIZE, 0.3), 0), True),
    ]:
        totals, traffic = summed(x)
        helpers.assert_same_on_all_ranks(totals)
        np.testing.assert_array_equal(totals[0], helpers.total(x))
        most = (x != 0).sum(axis=1).max()
        # To each of the others: how many, and of each 32 bits and the value.
        coo = (RANKS - 1) * (4 + (4 + 4) * most / RANKS)
        dense = traffic.dense[0] / 2
        expected = dense if is_dense else coo
        np.testing.assert_allclose(traffic.push.payload[0], expected, rtol=1e-5)
        np.testing.assert_allclose(traffic.density_before[0], most / SIZE, rtol=1e-5)


def test_no_code_but_coo_carries_slots_that_do_not_ascend():
    with pytest.raises(errors.ArgumentError, match="'coo8' is for slots that ascend"):
        schemes.BalancedParallelism(ownership=RULE, push_code="coo8")


def test_a_state_without_the_slots_of_units_is_refused():
    tables = MurmurHash(seed=5).tables(SIZE, RANKS)
    with pytest.raises(errors.StateError, match=r"and one .* of their slots"):
        RULE.over(SIZE, RANKS, tables)
