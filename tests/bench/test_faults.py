"""Jobs in which something befalls a host: they end by its name, and nothing is lost."""

import dataclasses
import tempfile
from typing import NamedTuple

import jax
import pytest

import sparsejax
from benchmarks.faults import __main__ as faults, books, systems
from benchmarks.faults.settings import FAULTS, SCHEMES, Settings
from tests import helpers


def test_ranks_of_a_step_are_those_of_its_run():
    settings = Settings(hosts=4, resumed=6)
    assert [settings.ranks_at(step) for step in (0, 5, 6, 11)] == [4, 4, 3, 3]
    assert dataclasses.replace(settings, resumed=-1).ranks_at(11) == 4


def test_every_scheme_and_fault_has_a_name():
    assert set(systems.SYSTEMS) == set(SCHEMES)
    assert FAULTS["stop"].seconds(5.0) == 2 * FAULTS["stop"].within(0.0) == 10.0
    with pytest.raises(ValueError, match="unknown faults 'fire'"):
        Settings(faults=("fire",))


class Hosts(NamedTuple):
    """How many ranks take each step of a job."""

    seed: int
    ranks: tuple[int, ...]

    def ranks_at(self, step):
        return self.ranks[step]


def trained(scheme, run):
    """What is trained on the ranks of the last step, the state behind that, and books.

    Where the number of ranks changes, a checkpoint is restored.
    """
    training, state = None, None
    for step, n in enumerate(run.ranks):
        if training is None or n != run.ranks[step - 1]:
            training, before = systems.Training(scheme, helpers.mesh_of(n), run.seed), state
            state = training.first()
            if before is not None:
                with tempfile.TemporaryDirectory() as folder:
                    sparsejax.save(f"{folder}/state", before)
                    state = sparsejax.restore(f"{folder}/state", like=state)
        state = training.step(state, training.batches(step))
    return training, state, books.books(run, training)


def with_nodes(state, kind, change):
    """A state in which something else is in the place of nodes of a kind."""
    ours = lambda node: isinstance(node, kind)
    one = lambda node: change(node) if ours(node) else node
    return state._replace(opt_state=jax.tree.map(one, state.opt_state, is_leaf=ours))


def moved(state):
    """A state with another number in one row of the table."""
    table = jax.tree.map(lambda x: x.at[7, 3].add(0.01), state.params["table"])
    return state._replace(params=state.params | {"table": table})


@pytest.mark.parametrize("scheme", ["rows", *helpers.slow("dgc", "momentum", "embrace")])
def test_what_is_lost_is_seen_in_the_books(scheme):
    """On fewer ranks than before, too."""
    run = Hosts(3, (2,) * 3 if scheme == "rows" else (3, 3, 3, 2))
    training, state, account = trained(scheme, run)
    assert account.lost(state) < faults.ROUNDING
    # A step that did not count, a state that is gone, a number that was not applied.
    fewer = state._replace(step=state.step - 1)
    fresh = state._replace(opt_state=training.first().opt_state)
    for other in (fewer, fresh, moved(state)):
        assert account.lost(other) > faults.ROUNDING


@pytest.mark.slow
@pytest.mark.multiprocess
def test_hosts_that_are_left_go_on_with_nothing_lost():
    row = faults.case(Settings(hosts=3, steps=8, scheme="dgc", fault="kill"))
    assert row["wrong"] == ""
    assert row["kept"] in (3, 6)
    assert row["ended"] < 5.0
    assert row["lost"] < faults.ROUNDING
