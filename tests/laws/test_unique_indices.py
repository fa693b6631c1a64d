"""Indices that are said to be unique are: where they repeat, a GPU loses an addition.

CPUs add what repeats whatever they are told, so no sum shows a false claim there. Programs
are traced as for GPUs, and each claim is checked on the indices with which it runs. The
sums of these programs are held to the exact ones at the same time.
"""

import functools
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import schemes
from sparsejax.units.row_grads import RowGrads
from tests import helpers
from tests.laws.test_exact_sum import OF_EACH_KIND, SCHEMES


pytestmark = pytest.mark.slow
RANKS, SIZE, HEIGHT, WIDTH, COUNT = 3, 3001, 517, 3, 60
AT = type(jnp.zeros(1).at[0])  # what claims are made of: x.at[indices]
# One of each kind that lists units, and those whose owners have tables.
KINDS = [name for name in OF_EACH_KIND if name not in ("all_reduce", "omni_reduce")]
KINDS += ["balanced_algorithm_1"]


class Claims:
    """What is said of indices while a program is traced, and what is false as it runs."""

    def __init__(self):
        self.made, self.false = set(), set()

    def watch(self, name, original):
        def call(at, *given, unique_indices=False, **how):
            if unique_indices:
                where = _site()
                self.made.add(where)
                index = at.index if isinstance(at.index, tuple) else (at.index,)
                lists = {i: x for i, x in enumerate(index) if not isinstance(x, slice)}
                sizes = [at.array.shape[i] for i in lists]
                note = functools.partial(self.note, where, sizes)
                jax.debug.callback(note, *lists.values())
            return original(at, *given, unique_indices=unique_indices, **how)

        return call

    def note(self, where, sizes, *lists):
        """Of what is in range nothing may repeat; the rest is dropped."""
        whole = np.broadcast_arrays(*map(np.asarray, lists))
        flat = np.stack([x.reshape(-1) for x in whole], 1)
        inside = flat[((flat >= 0) & (flat < sizes)).all(1)]
        if len(np.unique(inside, axis=0)) < len(inside):
            self.false.add(where)


def _site():
    """Where in the library a claim is made."""
    for frame in reversed(traceback.extract_stack()):
        for folder in ("/sparsejax/", "/pallas_kernels/"):
            if folder in frame.filename:
                return f"{folder}{frame.filename.rpartition(folder)[2]}:{frame.lineno}"
    return "here"


@pytest.fixture(scope="module")
def watched():
    """The claims of programs that are traced from now on, as for GPUs."""
    found = Claims()
    with pytest.MonkeyPatch.context() as patch, helpers.for_gpus():
        for name in ("add", "set", "get"):
            patch.setattr(AT, name, found.watch(name, getattr(AT, name)))
        jax.clear_caches()  # once: what one test has traced is watched in the others, too
        yield found
    jax.clear_caches()


@pytest.fixture
def claims(watched):
    """Those of one test."""
    watched.made.clear()
    watched.false.clear()
    return watched


def run(step, *operands):
    jax.block_until_ready(helpers.ranked(step, RANKS)(*operands))
    jax.effects_barrier()


@pytest.mark.parametrize(
    ("name", "shape"), [*((name, (SIZE,)) for name in KINDS), ("balanced", (HEIGHT, WIDTH))]
)
def test_indices_of_a_scheme_are_unique_where_it_says_so(name, shape, claims):
    scheme = SCHEMES[name]
    add = lambda x: helpers.call(scheme, x, helpers.init(scheme, x)).total
    summed = helpers.ranked(add, RANKS)
    # By entries; by entries in, and whole back; densely.
    for density in (0.0, 0.01, 0.2, 0.3, 1.0):
        x = helpers.gradients(RANKS, shape[0], density, shape=shape[1:], seed=5)
        totals = summed(x)
        jax.effects_barrier()
        helpers.assert_same_on_all_ranks(totals)
        np.testing.assert_array_equal(totals[0], helpers.total(x))
    assert not claims.false


@pytest.mark.parametrize("name", ["balanced", "ag_sparse", "ag_sparse_doubling"])
def test_indices_of_listed_rows_are_unique_where_it_says_so(name, claims):
    """Of lists in which ids repeat, and in which some are of no row."""
    rules = {"": "row", "w": "sparse"}
    tx = sparsejax.sync(SCHEMES[name], helpers.AXIS, reduce="sum", rules=rules)

    def add(ids, rows):
        own = RowGrads(ids, rows, (HEIGHT, WIDTH))
        state = tx.init({"w": jnp.zeros((HEIGHT, WIDTH))})
        updates, _ = tx.update({"w": own}, state)
        return sparsejax.apply_updates({"w": jnp.zeros((HEIGHT, WIDTH))}, updates)

    rng = np.random.default_rng(2)
    ids = rng.integers(-3, HEIGHT + 5, (RANKS, COUNT)).astype(np.int32)
    ids[:, :7] = 11
    run(add, ids, rng.standard_normal((RANKS, COUNT, WIDTH)).astype(np.float32))
    assert not claims.false
    assert claims.made


def test_indices_of_entries_are_unique_where_it_says_so(claims):
    rules = {"w": "sparse"}
    tx = sparsejax.sync(schemes.Zen(), helpers.AXIS, reduce="sum", rules=rules)

    def add(indices, values):
        own = sparsejax.SparseTensor(indices, values, (SIZE,))
        return tx.update({"w": own}, tx.init({"w": jnp.zeros(SIZE)}))[0]

    rng = np.random.default_rng(3)
    indices = rng.integers(-2, SIZE + 4, (RANKS, COUNT)).astype(np.int32)
    indices[:, :9] = 5
    run(add, indices, rng.standard_normal((RANKS, COUNT)).astype(np.float32))
    assert not claims.false
    assert claims.made


def test_a_false_claim_is_seen(claims):
    places = jnp.array([3, 4, 3, 90, 90])
    add = lambda x: x.at[places].add(1.0, mode="drop", unique_indices=True)
    run(add, jnp.zeros((RANKS, 9)))
    assert len(claims.false) == 1
    beyond = lambda x: x.at[places[1:]].add(1.0, mode="drop", unique_indices=True)
    claims.false.clear()
    run(beyond, jnp.zeros((RANKS, 9)))
    assert not claims.false
    assert claims.made == {"here"}
