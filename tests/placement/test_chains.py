"""What does not fit together in a chain is found when its state is made."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import sparsejax
from sparsejax.errors import ArgumentError, StateError
from sparsejax.state import tree
from tests import helpers


PARAMS = {"table": jnp.zeros((60, 4)), "bias": jnp.zeros(3)}
N = 2


def init(tx, **options):
    return sparsejax.init(tx, PARAMS, helpers.mesh_of(N), **options)


def top_k():
    return sparsejax.top_k(0.1, min_size=1)


def test_an_optimizer_in_front_of_the_synchronization_is_named():
    tx = optax.chain(optax.adam(1e-3), sparsejax.dense_sync())
    with pytest.raises(StateError, match=r"0/0/mu/bias.* differ by rank.*zen_sync"):
        init(tx, check_vma=False)


def test_leaves_of_flax_models_are_named_as_in_metrics():
    """Their parameters end in `.value`, and their gradients do not."""
    params = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
    named = tree.flatten(params)[0][0]
    assert named in ("bias", "kernel")
    tx = optax.chain(optax.adam(1e-3), sparsejax.zen_sync())
    with pytest.raises(StateError, match=f"'0/0/mu/{named}' would differ by rank"):
        sparsejax.init(tx, params, helpers.mesh_of(N))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: sparsejax.accumulate(tx, every=2),
        lambda tx: sparsejax.warm_up(tx, steps=2),
        lambda tx: sparsejax.skip_nonfinite(tx),
    ],
)
def test_it_is_found_inside_of_wrappers(wrap):
    with pytest.raises(StateError, match=r"mu/bias.* differ by rank"):
        init(wrap(optax.chain(optax.adam(1e-3), sparsejax.dense_sync())))


def test_leaves_that_someone_else_sums_may_have_a_state_in_front():
    """Those that the synchronization does not get are summed by whoever masked them."""
    sync = optax.masked(sparsejax.zen_sync(), {"table": True, "bias": False})
    init(optax.chain(sync, optax.adam(1e-3)))
    of_bias = optax.masked(optax.trace(0.9), {"table": False, "bias": True})
    init(optax.chain(of_bias, sync))


@pytest.mark.parametrize("between", [optax.scale(-1.0), optax.scale_by_learning_rate(0.1)])
def test_indices_that_something_in_between_computes_with(between):
    tx = optax.chain(top_k(), between, sparsejax.zen_sync())
    with pytest.raises(ArgumentError, match=r"indices .*'bias' were changed.*zen_sync"):
        init(tx)


def test_the_step_refuses_them_too():
    """Where the state was made without the check, as inside a shard_map of one's own."""
    tx = optax.chain(top_k(), optax.scale(2.0), sparsejax.dense_sync())

    def run(grads):
        return tx.update(grads, tx.init(helpers.parameters(grads)))[0]

    run = helpers.shard_map(
        run, mesh=helpers.mesh_of(N), in_specs=jax.P("data"), out_specs=jax.P()
    )
    with pytest.raises(ArgumentError, match=r"indices .*'bias' were changed"):
        jax.eval_shape(run, PARAMS | {"bias": jnp.zeros(4)})


@pytest.mark.parametrize(
    "between",
    [optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.scale_by_adam()],
)
def test_what_fails_between_a_sparsifier_and_its_synchronization(between):
    tx = optax.chain(top_k(), between, sparsejax.zen_sync())
    with pytest.raises((ArgumentError, StateError), match=r"sparsejax\.zen_sync\(\)"):
        init(tx)


def test_entries_that_nobody_sums():
    with pytest.warns(UserWarning, match=r"all leaves .*sparsejax.zen_sync"):
        init(top_k())


def test_an_optimizer_that_is_run_on_zeros():
    with pytest.warns(UserWarning, match=r"sparsejax\.accumulate\(optax.chain"):
        init(optax.chain(sparsejax.accumulate(sparsejax.zen_sync(), 2), optax.adam(1e-3)))
    asleep = optax.conditionally_mask(optax.adam(1e-3), lambda step: step % 2 == 1)
    init(optax.chain(sparsejax.accumulate(sparsejax.zen_sync(), 2), asleep))
    init(optax.chain(sparsejax.accumulate(sparsejax.zen_sync(), 2), optax.sgd(0.1)))
    inside = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))
    init(sparsejax.accumulate(inside, every=2))
    # Numbers of optax's are no optimizer's.
    by_rate = lambda rate: sparsejax.local_steps(optax.sgd(rate), every=2)
    init(optax.inject_hyperparams(by_rate)(0.1))
    waits = sparsejax.accumulate(sparsejax.zen_sync(), 2)
    beside = optax.inject_hyperparams(lambda rate: optax.chain(waits, optax.adam(rate)))
    with pytest.warns(UserWarning, match=r"sparsejax\.accumulate\(optax.chain"):
        init(beside(0.1))
    within = optax.inject_hyperparams(
        lambda rate: sparsejax.accumulate(
            optax.chain(sparsejax.zen_sync(), optax.scale(rate)), 2
        )
    )
    with pytest.warns(UserWarning, match=r"sparsejax\.accumulate\(optax.chain"):
        init(optax.chain(within(0.1), optax.adam(1e-3)))


def test_a_chain_that_wants_more_arguments_is_not_refused():
    """It cannot be run with parameters alone, and that is no mistake."""
    plateau = optax.contrib.reduce_on_plateau()
    synced = sparsejax.zen_sync(), optax.adam(1e-3), plateau
    init(optax.chain(*synced))
    init(optax.chain(top_k(), *synced))
    init(optax.chain(top_k(), sparsejax.zen_sync(), optax.lbfgs()))


def test_a_chain_that_wants_the_loss_is_checked():
    plateau = optax.contrib.reduce_on_plateau()
    with pytest.raises(StateError, match="stands in front of the synchronization"):
        init(optax.chain(optax.adam(1e-3), sparsejax.zen_sync(), plateau))


def test_what_fails_without_entries_too_is_not_blamed_on_them():
    """Types of its branches differ, which only matters where they are checked."""
    inside = optax.chain(top_k(), sparsejax.zen_sync(), optax.sgd(0.1))
    init(optax.conditionally_mask(inside, lambda step, **_: step % 2 == 0))
