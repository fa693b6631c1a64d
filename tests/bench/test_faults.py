"""Jobs in which something befalls a host: they end by its name, and nothing is lost."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

import sparsejax
from benchmarks.faults import __main__ as faults, rank
from benchmarks.faults.settings import FAULTS, SCHEMES, Settings
from tests import helpers


def test_ranks_of_a_step_are_those_of_its_run():
    settings = Settings(hosts=4, resumed=6)
    assert [settings.ranks_at(step) for step in (0, 5, 6, 11)] == [4, 4, 3, 3]
    assert dataclasses.replace(settings, resumed=-1).ranks_at(11) == 4


def test_every_scheme_and_fault_has_a_name():
    assert set(rank.SCHEMES) == set(SCHEMES)
    assert FAULTS["stop"].seconds(5.0) == 2 * FAULTS["stop"].within(0.0) == 10.0
    with pytest.raises(ValueError, match="unknown faults 'fire'"):
        Settings(faults=("fire",))


@pytest.mark.slow
def test_what_is_lost_is_seen_in_the_books():
    ranks = 2
    settings = Settings(hosts=ranks, seed=3)
    tx = optax.chain(rank.SCHEMES["dgc"](), optax.sgd(1.0))
    trainer = sparsejax.data_parallel(rank.loss_fn, tx, helpers.mesh_of(ranks))
    params = {name: np.zeros(shape, np.float32) for name, shape in rank.SHAPES.items()}
    state = trainer.init(params)
    for step in range(3):
        own = [rank.gradient(settings.seed, step, r) for r in range(ranks)]
        state, _ = trainer.step(state, jax.tree.map(lambda *x: np.stack(x), *own))
    books = rank.Books(settings)
    assert books.lost(state) < faults.ROUNDING
    # A step that did not count, a residual that is gone, a number that was not applied.
    assert books.lost(state._replace(step=state.step - 1)) > faults.ROUNDING
    fresh = trainer.init(params)
    assert books.lost(state._replace(opt_state=fresh.opt_state)) > faults.ROUNDING
    other = jax.tree.map(lambda x: x.at[0].add(0.1), state.params)
    assert books.lost(state._replace(params=other)) > faults.ROUNDING


@pytest.mark.slow
@pytest.mark.multiprocess
def test_hosts_that_are_left_go_on_with_nothing_lost():
    row = faults.case(Settings(hosts=3, steps=8, scheme="dgc", fault="kill"))
    assert row["wrong"] == ""
    assert row["kept"] in (3, 6)
    assert row["ended"] < 5.0
    assert row["lost"] < faults.ROUNDING
