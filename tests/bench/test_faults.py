"""Jobs in which something befalls a host: they end by its name, and nothing is lost."""

import dataclasses
import functools
import tempfile
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from benchmarks.faults import __main__ as faults, books, systems
from benchmarks.faults.kinds import FAULTS, Fault
from benchmarks.faults.rank import Injection
from benchmarks.faults.settings import LOCAL, SCHEMES, Settings
from sparsejax.rounds import LocalStepsState
from sparsejax.rows.updates.state import LazyState
from sparsejax.state.pending import Pending
from sparsejax.transforms.feedback import FeedbackState
from tests import helpers


class Host:
    """A host that keeps what it is told."""

    rank = 1

    def __init__(self):
        self.reported = []

    def report(self, **numbers):
        self.reported.append([*numbers])


@pytest.mark.parametrize("between", [False, True])
def test_a_fault_of_the_table_befalls_its_host_in_its_step(between, monkeypatch):
    done = []
    inject = lambda here, seconds: done.append((here, seconds)) or True
    new = Fault("new", "is new", inject, ends=True, lasts=4.0, between=between)
    monkeypatch.setitem(FAULTS, "new", new)
    settings = Settings(at=5, lost=1, fault="new", silence=0.5)
    here, other = Host(), Host()
    other.rank = 0
    leaves = [Injection(settings, other).at(5), *map(Injection(settings, here).at, (4, 5))]
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert done == [(here, 2.0)]
    assert (here.reported, other.reported) == ([["befallen"]], [])
    # One in a step is in another thread, and does not tell the one that trains to leave.
    assert leaves == [False, False, between]


@pytest.mark.parametrize(("befallen", "is_late"), [(3.0, False), (6.0, True), (None, True)])
def test_what_a_job_survives_happens_while_all_hosts_train(befallen, is_late):
    rows = [[{"trained": 5.0}], [{"trained": 7.0}]]
    if befallen is not None:
        rows[1].insert(0, {"befallen": befallen})
    wrong = faults._too_late(faults.job.Outcome(0, rows, [], 8.0))
    assert bool(wrong) == is_late


def test_a_job_too_short_for_a_fault_is_refused():
    short = Settings(scheme="diloco", fault="pause", moment="save", steps=6)
    with pytest.raises(ValueError, match=r"no step of 6 is left for .*'pause'.* --steps"):
        faults.case(short)
    with pytest.raises(ValueError, match="unknown faults 'fire'"):
        Settings(faults=("fire",))


def test_hosts_that_train_in_rounds_are_befallen_at_each_moment():
    settings = Settings(
        schemes=("zen", "diloco"), faults=("kill",), moments=("round", "exchange", "save")
    )
    found = {(one.scheme, one.moment): one.candidates() for one in settings.cases()}
    assert set(systems.SYSTEMS) == set(SCHEMES)
    assert found == {
        ("zen", "any"): [*range(4, 12)],
        ("diloco", "round"): [4, 6, 8, 10],
        ("diloco", "exchange"): [5, 7, 9, 11],
        ("diloco", "save"): [5, 8, 11],
    }


class Hosts(NamedTuple):
    """How many ranks take each step of a job."""

    seed: int
    ranks: tuple[int, ...]

    def ranks_at(self, step):
        return self.ranks[step]


def trained(scheme, run):
    """The state after all steps of a job, and its books.

    Where the number of ranks changes, a checkpoint is restored.
    """
    training = systems.Training(scheme, helpers.mesh_of(run.ranks[0]), run.seed)
    state = training.first()
    for step, n in enumerate(run.ranks):
        if n != training.mesh.size:
            training = systems.Training(scheme, helpers.mesh_of(n), run.seed)
            with tempfile.TemporaryDirectory() as folder:
                sparsejax.save(f"{folder}/state", state)
                state = sparsejax.restore(f"{folder}/state", like=training.first())
        state = training.step(state, training.batches(step))
    return state, books.books(run, training)


def without(kind, **gone):
    """From a state to one in which nodes of a kind have other fields.

    Args:
        kind: The type of the nodes.
        gone: From a node to what its field is then.
    """
    ours = lambda node: isinstance(node, kind)

    def changed(node):
        if not ours(node):
            return node
        fields = {name: value(node) for name, value in gone.items()}
        replace = getattr(node, "_replace", functools.partial(dataclasses.replace, node))
        return replace(**fields)

    def one(state):
        opt_state = jax.tree.map(changed, state.opt_state, is_leaf=ours)
        return state._replace(opt_state=opt_state)

    return one


def zeros(field):
    return lambda node: jax.tree.map(jnp.zeros_like, getattr(node, field))


# What each system keeps for later steps, gone: a residual, velocities, the counts of steps
# that rows have missed, rows that are held back. All kinds of them: dgc keeps a residual as
# two of these do, and the job below trains it; diloco an offset as sparse_loco does, and
# steps of rows are counted as in embrace.
RESIDUAL = without(FeedbackState, residual=zeros("residual"))
SEEN = without(LazyState, last=lambda x: jax.tree.map(lambda y: y * 0 + x.step, x.last))
OFFSET = without(LocalStepsState, offset=zeros("offset"))
GONE = {
    "sparse_loco": [OFFSET, RESIDUAL],
    "momentum": [RESIDUAL, without(FeedbackState, momentum=zeros("momentum"))],
    "embrace": [SEEN, without(Pending, ids=lambda x: jnp.full_like(x.ids, x.height))],
}


def moved_at_one_place(x):
    x = np.array(x)
    x[7, 3] += 0.01
    return x


# Rows that were held back may need more room than a state of fewer ranks has.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("scheme", GONE)
def test_what_is_lost_is_seen_in_the_books(scheme):
    """Where training has gone on from a checkpoint on fewer ranks."""
    # Of two steps a round: it goes on, and ends, within one.
    run = Hosts(3, (3, 3, 3, 2, 2) if scheme in LOCAL else (3, 3, 3, 2))
    state, account = trained(scheme, run)
    assert account.lost(state) < faults.ROUNDING
    table = jax.tree.map(moved_at_one_place, state.params["table"])
    moved = state._replace(params=state.params | {"table": table})
    fewer = state._replace(step=state.step - 1)
    for other in (moved, fewer, *(gone(state) for gone in GONE[scheme])):
        assert account.lost(other) > faults.ROUNDING


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("compiled_fast")
def test_hosts_that_are_left_go_on_with_nothing_lost():
    row = faults.case(Settings(hosts=3, steps=8, scheme="dgc", fault="kill"))
    assert row["wrong"] == ""
    assert row["kept"] in (3, 6)
    assert row["ended"] < 5.0
    assert row["lost"] < faults.ROUNDING
