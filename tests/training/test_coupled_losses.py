"""A loss that couples examples is another on each share of a batch, unless it gathers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax
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
    for batch in batches:
        loss, grads = jax.value_and_grad(in_batch)(want, batch)
        updates, state = tx.update(grads, state, want)
        want = optax.apply_updates(want, updates)
        losses.append(float(loss))
    chain = optax.chain(sparsejax.zen_sync(), sparsejax.lazy(optax.adam(0.05)))
    trainer = sparsejax.data_parallel(loss_fn, chain, helpers.mesh_of(RANKS))
    state, found = trainer.init(params), []
    for batch in batches:
        state, loss = trainer.step(state, batch)
        found.append(float(loss))
    return found, losses


def test_gathered_inside_the_loss_it_is_that_of_the_whole_batch():
    found, want = trained(of_the_docs())
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_by_share_it_is_another_loss():
    """With fewer negatives: by about the logarithm of the ranks."""
    found, want = trained(in_batch, steps=1)
    assert 0.5 * np.log(RANKS) < want[0] - found[0] < 2 * np.log(RANKS)
