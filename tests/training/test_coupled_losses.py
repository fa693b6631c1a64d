"""A loss that couples examples is another on each share of a batch, unless it gathers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.errors import ArgumentError
from tests import helpers
from tests.test_readme import PAGES


RANKS, EXAMPLES, HEIGHT, WIDTH = 4, 32, 64, 8


def in_batch(params, batch):
    """In-batch negatives, of the examples that it is given."""
    users, items = params["users"][batch["user"]], params["items"][batch["item"]]
    labels = jnp.arange(len(users))
    scores = users @ items.T
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def of_the_docs():
    """The loss that *Sharp bits* shows."""
    (block,) = re.findall(
        r"```python\n(def loss_fn\(.*?\n)```", PAGES["docs/sharp_bits.md"], re.S
    )
    names = {"jax": jax, "jnp": jnp, "optax": optax}
    exec(block, names)
    return names["loss_fn"]


def trained(loss_fn, steps=3):
    rng = np.random.default_rng(0)
    params = {
        name: rng.normal(size=(HEIGHT, WIDTH)).astype(np.float32)
        for name in ("users", "items")
    }
    batches = [
        {
            name: rng.integers(0, HEIGHT, EXAMPLES).astype(np.int32)
            for name in ("user", "item")
        }
        for _ in range(steps)
    ]
    tx = optax.adam(0.05)
    state, want, losses = tx.init(params), params, []

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(in_batch)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for batch in batches:
        want, state, loss = step(want, state, batch)
        losses.append(float(loss))
    chain = optax.chain(sparsejax.zen_sync(), sparsejax.lazy(optax.adam(0.05)))
    trainer = sparsejax.data_parallel(loss_fn, chain, helpers.mesh_of(RANKS))
    state, found = trainer.init(params), []
    for batch in batches:
        state, loss = trainer.step(state, batch)
        found.append(float(loss))
    return found, losses


@pytest.mark.slow
def test_gathered_inside_the_loss_it_is_that_of_the_whole_batch():
    found, want = trained(of_the_docs())
    np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.slow
def test_by_share_it_is_another_loss():
    """With fewer negatives: by about the logarithm of the ranks."""
    found, want = trained(in_batch, steps=1)
    assert 0.5 * np.log(RANKS) < want[0] - found[0] < 2 * np.log(RANKS)


@pytest.mark.parametrize("reduce", [jax.lax.pmean, jax.lax.psum])
def test_a_loss_that_is_reduced_over_the_ranks(reduce):
    """It is refused where types tell; its gradient would be too small, and nothing else."""
    rng = np.random.default_rng(1)
    params = {"w": rng.normal(size=(8, 3)).astype(np.float32)}
    x = rng.normal(size=(16, 8)).astype(np.float32)

    def own(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)

    def reduced(params, x):
        return reduce(own(params, x), "data")

    tx, mesh = optax.chain(sparsejax.dense_sync(), optax.sgd(1.0)), helpers.mesh_of(RANKS)
    trainer = sparsejax.data_parallel(reduced, tx, mesh)
    with pytest.raises(
        ArgumentError, match=r"lax\.pmean\(loss, 'data'\).*this rank's share"
    ):
        trainer.step(trainer.init(params), x)
    trainer = sparsejax.data_parallel(reduced, tx, mesh, check_vma=False)
    state, _ = trainer.step(trainer.init(params), x)
    scale = 1 if reduce is jax.lax.pmean else RANKS
    want = params["w"] - scale * jax.grad(own)(params, x)["w"]
    np.testing.assert_allclose(state.params["w"], want, rtol=1e-5, atol=1e-6)
