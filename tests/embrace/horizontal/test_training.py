"""Training whose gradients are reduced a step later is training without that."""

import functools

import jax
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.embrace import horizontal
from tests import helpers
from tests.embrace.horizontal.model import ORDER, batch_of, loss_fn, params, same
from tests.helpers import mesh_of


STEPS = 3
OPTIMIZERS = {"adam": optax.adamw(1e-2), "adagrad": optax.adagrad(0.1)}
SYNC = {"dense": sparsejax.dense_sync(), "zen": sparsejax.zen_sync(rules={".": "sparse"})}


def chain(optimizer, sync="dense"):
    return optax.chain(SYNC[sync], OPTIMIZERS[optimizer])


@functools.cache
def trainer(n, optimizer, order, sync="dense"):
    tx = chain(optimizer, sync)
    tx = tx if order is False else horizontal(tx, order)
    return sparsejax.data_parallel(loss_fn, tx, mesh_of(n), donate=False)


@functools.cache
def trained(n, optimizer, order, sync="dense", steps=STEPS):
    """The losses and the states of some steps."""
    one = trainer(n, optimizer, order, sync)
    state, losses, states = one.init(params()), [], []
    for step in range(steps):
        state, loss = one.step(state, batch_of(step, n))
        losses.append(float(loss))
        states.append(state)
    return losses, states


@pytest.mark.parametrize(
    ("n", "optimizer", "sync"), [(2, "adam", "dense"), *helpers.slow((4, "adagrad", "zen"))]
)
def test_it_is_training_without_it(n, optimizer, sync):
    """At every step the loss is, and behind a flush all parameters and states are."""
    losses, states = trained(n, optimizer, ORDER, sync)
    want, whole = trained(n, optimizer, False, sync)
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    flush = trainer(n, optimizer, ORDER, sync).flush
    for late, right in zip(states, whole, strict=True):
        assert not same(late.params, right.params)
        done = flush(late)
        close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-7)
        jax.tree.map(close, done.params, right.params)
        find = optax.tree_utils.tree_get_all_with_path
        kept = find(right.opt_state[1], "words")
        own = find(done.opt_state.blocks["words"][1], "words")
        assert len(own) == len(kept) > 0
        for (_, got), (_, wanted) in zip(own, kept, strict=True):
            close(got, wanted)
        for leaf in jax.tree.leaves(done.params):
            copies = [np.asarray(x.data) for x in leaf.addressable_shards]
            assert len(copies) == n
            assert len({x.tobytes() for x in copies}) == 1


@pytest.mark.slow
def test_a_step_behind_a_flush_goes_on_as_if_there_were_none():
    """Twice flushed is once flushed, and the next step applies nothing again."""
    one = trainer(2, "adam", ORDER)
    _, states = trained(2, "adam", ORDER)
    done = one.flush(states[0])
    assert same(one.flush(done), done)
    assert int(done.opt_state.held) == 0
    assert int(states[0].opt_state.held) == 1
    after, loss = one.step(done, batch_of(1, 2))
    assert float(loss) == trained(2, "adam", ORDER)[0][1]
    assert same(after.params, done.params)
    assert same(after.opt_state, states[1].opt_state)


@pytest.mark.slow
def test_evaluation_applies_what_is_carried():
    _, states = trained(2, "adam", ORDER)
    one = trainer(2, "adam", ORDER)
    batch = batch_of(7, 2)
    want = one.evaluate(one.flush(states[1]), batch)
    assert float(one.evaluate(states[1], batch)) == float(want)
    assert float(one.evaluate(states[1]._replace(opt_state=None), batch)) != float(want)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sparsejax.lookup of a table")
def test_a_flush_catches_up_rows_of_tables_that_are_not_carried():
    """Those of `at_once` that `lazy` updates, where `embrace_sync` holds nothing back."""
    n, sync = 2, sparsejax.zen_sync(rules={"embedding": "sparse"})
    sgd, which = optax.sgd(0.1, momentum=0.9), lambda p: {k: k for k in p}
    each = {"embedding": sparsejax.lazy(sgd), "kernel": sgd}

    def loss(p, batch):
        vectors = sparsejax.lookup(p["embedding"], batch["ids"])
        return ((vectors @ p["kernel"] - batch["y"]) ** 2).mean()

    rng = np.random.default_rng(0)
    shapes = {"embedding": (40, 3), "kernel": (3,)}
    given = {k: rng.normal(size=x).astype(np.float32) for k, x in shapes.items()}
    late = optax.chain(sync, optax.partition(each, which))
    states = []
    for tx in (horizontal(late, at_once=["embedding"]), optax.chain(sync, sgd)):
        one = sparsejax.data_parallel(loss, tx, mesh_of(n))
        state = one.init(given)
        for step in range(3):
            state, _ = one.step(state, batch_of(step, n))
        states.append(one.flush(state) if not states else state)
    for k, want in states[1].params.items():
        np.testing.assert_allclose(states[0].params[k], want, rtol=2e-6, atol=1e-7)
