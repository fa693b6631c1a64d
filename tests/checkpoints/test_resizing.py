"""A state for another number of ranks keeps what was held, or says what it has lost."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.errors import ArgumentError, StateError
from sparsejax.state.per_rank import find
from sparsejax.transforms.wrappers import AccumulateState
from tests import helpers


PARAMS = {"w": jnp.zeros((50, 4)), "b": jnp.zeros(3)}
OLD, NEW = 4, 2


def chain(reduce="mean"):
    inside = optax.chain(
        sparsejax.top_k(0.1, min_size=1),
        sparsejax.dense_sync(reduce=reduce),
        optax.adam(1e-3),
    )
    return sparsejax.accumulate(inside, every=2, reduce=reduce)


def state_of(tx, ranks, seed=None, params=PARAMS):
    """A first state, or one whose floating numbers were drawn, at rest."""
    state = sparsejax.init(tx, params, helpers.mesh_of(ranks))
    if seed is None:
        return state
    rng = np.random.default_rng(seed)

    def drawn(x):
        x = np.asarray(x)
        floats = np.issubdtype(x.dtype, np.floating)
        return rng.standard_normal(x.shape).astype(x.dtype) if floats else x

    return jax.tree.map(drawn, state)


def held(state):
    """The sums over ranks of residuals, and of accumulated gradients, by leaf."""
    trees = [sparsejax.residuals(state)]
    trees += [s.pending.value for s in find(state, AccumulateState)]
    return [np.sum(x, axis=0) for x in jax.tree.leaves(trees)]


@pytest.mark.parametrize(
    ("reduce", "old", "new"), [("mean", OLD, NEW), ("sum", NEW, OLD), ("mean", OLD, 3)]
)
def test_what_was_held_reaches_the_parameters_as_before(reduce, old, new):
    tx = chain(reduce)
    state, fresh = state_of(tx, old, seed=0), state_of(tx, new)
    moved = sparsejax.resized(state, like=fresh)
    # A mean over other ranks divides by their number, a sum by none.
    scale = new / old if reduce == "mean" else 1
    for now, before in zip(held(moved), held(state), strict=True):
        np.testing.assert_allclose(now, scale * before, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(moved.inner[2][0].mu["w"], state.inner[2][0].mu["w"])
    places = lambda tree: [x.sharding for x in jax.tree.leaves(tree)]
    assert places(moved) == places(fresh)
    assert jax.tree.structure(moved) == jax.tree.structure(fresh)
    with pytest.raises(ArgumentError, match=f"has reduce={reduce!r}: leave it out"):
        sparsejax.resized(state, fresh, reduce={"mean": "sum", "sum": "mean"}[reduce])


def test_rows_that_were_lost_on_the_way_are_missed():
    """As orbax loses them with strict=False: arrays are cut, and all else is the same."""
    tx, lost = chain(), state_of(chain(), OLD, seed=0)
    fresh = state_of(tx, NEW)
    lost = jax.tree.map(lambda x, like: x[: len(like)] if x.ndim else x, lost, fresh)
    for use in (
        lambda: sparsejax.resized(lost, like=fresh),
        lambda: sparsejax.state_specs(lost),
    ):
        with pytest.raises(StateError, match=r"for 4 ranks, .* 2 rows .*abstract_state"):
            use()


def test_ranks_that_do_not_divide_those_of_the_state_are_refused_by_jax():
    """In its own words, before sparsejax sees the state: *Sharp bits* quotes them."""
    tx, mesh = chain(), helpers.mesh_of(3)
    state = state_of(tx, OLD)
    step = jax.shard_map(
        lambda state: tx.update(sparsejax.local(PARAMS, "data"), state, PARAMS),
        mesh=mesh,
        in_specs=(sparsejax.state_specs(state),),
        out_specs=jax.P(),
    )
    with pytest.raises(ValueError, match="axis sizes that are not evenly divisible by"):
        jax.eval_shape(step, jax.tree.map(np.asarray, state))


def test_a_state_of_other_parameters_is_named():
    tx = chain()
    fresh = state_of(tx, NEW, params={**PARAMS, "w": jnp.zeros((51, 4))})
    with pytest.raises(StateError, match=r"'w' .*\[50, 4\].*\[51, 4\]"):
        sparsejax.resized(state_of(tx, OLD), like=fresh)


def test_dicts_as_a_checkpoint_without_a_target_gives_them_are_named():
    state = {"0": {"residual": np.zeros((4, 3))}}
    with pytest.raises(StateError, match=r"abstract_state"):
        sparsejax.resized(state, like=state_of(chain(), NEW))


def test_a_state_of_another_reduction_is_named():
    """What ranks hold of a mean weighs otherwise than what they hold of a sum."""
    make = lambda reduce: optax.chain(
        sparsejax.top_k(0.1, min_size=1), sparsejax.dense_sync(reduce=reduce)
    )
    state, like = state_of(make("mean"), OLD), state_of(make("sum"), NEW)
    with pytest.raises(StateError, match=r"reduce='mean', .* reduce='sum'"):
        sparsejax.resized(state, like=like)


def test_a_state_without_arrays_is_no_state_to_be_like():
    tx = chain()
    like = sparsejax.abstract_state(tx, PARAMS, helpers.mesh_of(NEW))
    with pytest.raises(ArgumentError, match=r"abstract_state.*sparsejax\.init"):
        sparsejax.resized(state_of(tx, OLD), like=like)


def test_a_state_of_another_reduction_is_no_state_of_a_synchronization():
    mesh = helpers.mesh_of(2)
    state = sparsejax.init(sparsejax.zen_sync(reduce="sum"), PARAMS, mesh)
    grads = jax.tree.map(lambda x: jnp.zeros((2, *x.shape)), PARAMS)

    def update(grads):
        grads = jax.tree.map(lambda x: x[0], grads)
        return sparsejax.zen_sync().update(grads, state)[0]

    with pytest.raises(StateError, match=r"with reduce='sum', .* has reduce='mean'"):
        helpers.run_ranks(lambda x: update(jax.tree.map(lambda y: y[None], x)), grads, 2)


def test_sums_of_columns_are_for_as_many_ranks_alone():
    """Five columns are two a rank on three ranks and on four, and not the same two."""
    chained = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))
    tx, weights = sparsejax.accumulate(chained, every=2), jnp.ones((7, 5))

    def made(ranks):
        mesh = helpers.mesh_of(ranks)
        return sparsejax.init(tx, {"t": sparsejax.ColumnTable.of(weights, mesh)}, mesh)

    with pytest.raises(StateError, match="table 't', each rank those of its own columns"):
        sparsejax.resized(made(3), like=made(4))
    moved = sparsejax.resized(made(3), like=made(3))
    assert helpers.octets(moved) == helpers.octets(made(3))


@pytest.mark.parametrize("path", ["'params/w'", "'step'", ""])
def test_like_needs_arrays_on_devices(path):
    """A state that was fetched to the host says of no array where it goes."""
    tx = optax.chain(sparsejax.dense_sync(), optax.sgd(0.5))
    trainer = sparsejax.data_parallel(lambda p, b: 0.0, tx, helpers.mesh_of(NEW))
    state = trainer.init({"w": np.zeros(3, np.float32)})
    like = jax.device_get(state) if path == "'step'" else state
    if path == "'params/w'":
        like = state._replace(params=jax.device_get(state.params))
    if not path:
        state, like = state.step, np.asarray(state.step)
    match = rf"on devices, and it.*{path} is ndarray, .*trainer.init\(params\)"
    with pytest.raises(ArgumentError, match=match):
        sparsejax.resized(state, like=like)
