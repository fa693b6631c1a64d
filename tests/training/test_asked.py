"""Optimizers that ask for the loss: which value they are given, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.errors import ArgumentError
from tests.helpers import mesh_of


BATCH = np.array([1, 3], np.float32)
PLATEAU = optax.contrib.reduce_on_plateau(patience=1, factor=0.5)
SENT = sparsejax.zen_sync()


def trainer(tx, **options):
    loss = lambda p, b: jnp.mean(p["w"] * b)
    return sparsejax.data_parallel(loss, tx, mesh_of(2), donate=False, **options)


def seen():
    """A transformation whose state is the value that it was given last."""
    init = lambda params: jnp.float32(0)
    update = lambda updates, state, params=None, *, value, **extra: (updates, value)
    return optax.GradientTransformationExtraArgs(init, update)


CHAINS = {
    "chain": lambda tx: optax.chain(SENT, tx),
    "accumulate": lambda tx: sparsejax.accumulate(optax.chain(SENT, tx), every=1),
    "warm_up": lambda tx: sparsejax.warm_up(optax.chain(SENT, tx), 1),
    "skip": lambda tx: sparsejax.skip_nonfinite(optax.chain(SENT, tx)),
    "rounds": lambda tx: sparsejax.local_steps(tx, every=2),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_value_is_the_loss_that_the_step_returns(kind):
    own = trainer(CHAINS[kind](optax.chain(seen(), optax.sgd(0.5))))
    state, loss = own.step(own.init({"w": np.float32(1)}), BATCH)
    assert float(loss) == 2
    values = [x for x in jax.tree.leaves(state.opt_state) if np.all(np.asarray(x) == 2)]
    assert any(jnp.issubdtype(x.dtype, jnp.floating) for x in values)


def sums(tx):
    own = trainer(optax.chain(SENT, tx, optax.sgd(0.5)))
    state = own.init({"w": np.float32(1)})
    return str(jax.make_jaxpr(own.compiled(state))(state, BATCH)).count("psum")


def test_value_is_not_summed_a_second_time():
    assert sums(PLATEAU) == sums(optax.identity())


def test_a_value_that_is_not_required_is_not_given():
    update = lambda g, state, params=None, *, value=7.0, **extra: (g, jnp.float32(value))
    tx = optax.GradientTransformationExtraArgs(lambda params: jnp.float32(0), update)
    own = trainer(optax.chain(SENT, tx))
    state, _ = own.step(own.init({"w": np.float32(1)}), BATCH)
    assert float(state.opt_state[1]) == 7


@pytest.mark.parametrize("kind", ["chain", "rounds"])
def test_the_rate_falls_on_a_plateau(kind):
    # The branches of optax's conds are of other types where a state varies by rank.
    options = {"check_vma": kind != "rounds"}
    own = trainer(CHAINS[kind](optax.chain(optax.sgd(0.0), PLATEAU)), **options)
    state = own.init({"w": np.float32(1)})
    for _ in range(2):
        state, _ = own.step(state, BATCH)
    (scale,) = optax.tree.get_all_with_path(state.opt_state, "scale")
    np.testing.assert_array_equal(scale[1], 0.5)


def test_what_a_trainer_does_not_have_is_an_error():
    own = trainer(optax.chain(SENT, optax.lbfgs()))
    state = own.init({"w": np.float32(1)})
    with pytest.raises(ArgumentError, match=r"needs grad=, value_fn= in each update"):
        own.step(state, BATCH)
    own = trainer(sparsejax.embrace.horizontal(optax.chain(SENT, PLATEAU)))
    with pytest.raises(ArgumentError, match=r"horizontal updates .* missing .*'value'"):
        own.init({"w": np.float32(1)})
    own = trainer(sparsejax.local_steps(PLATEAU, every=2), overlap=True)
    with pytest.raises(ArgumentError, match=r"needs value=.*leave overlap out"):
        own.step(own.init({"w": np.float32(1)}), BATCH)
