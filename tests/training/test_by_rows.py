"""`data_parallel` differentiates by rows where the optimizer takes rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import errors
from sparsejax.state import observing, tree
from sparsejax.training.on_rank.by_rows import takes_rows
from sparsejax.units.row_grads import is_row_grads
from tests.helpers import mesh_of


PARAMS = {
    "users": jnp.ones((4_000, 20)),
    "items": jnp.ones((5_000, 20)),
    "kernel": jnp.ones((20, 3)),
}
ZEN = sparsejax.zen_sync()


def sgd_of_rows(seen, paths=("users", "items", "kernel")):
    """Plain SGD that takes rows, and remembers which leaves were rows."""

    def init(params):
        if observing.is_observing():
            observing.report_rows(None, [p for p in paths if p in params])
        return optax.EmptyState()

    def update(updates, state, params=None, **extra):
        del params, extra
        kinds = jax.tree.map(is_row_grads, updates, is_leaf=is_row_grads)
        seen.append(kinds)
        step = lambda leaf: -0.1 * tree.to_dense(leaf)
        return jax.tree.map(step, updates, is_leaf=is_row_grads), state

    return optax.GradientTransformationExtraArgs(init, update)


def loss_fn(params, batch):
    hidden = params["users"][batch["users"]] * params["items"][batch["items"]]
    error = (hidden @ params["kernel"]).sum(-1) - batch["y"]
    return jnp.sum(batch["mask"] * error**2) / jnp.sum(batch["mask"])


def batch_of(step, n):
    rng = np.random.default_rng(step)
    return {
        "users": 400 * rng.integers(0, 6, 8 * n).astype(np.int32),  # again and again
        "items": rng.integers(0, 5_000, 8 * n).astype(np.int32),
        "y": rng.standard_normal(8 * n).astype(np.float32),
        # The last rank has no data.
        "mask": (np.arange(8 * n) < 8 * (n - 1)).astype(np.float32),
    }


def trained(tx, n, steps=2, **options):
    options["weight"] = lambda batch: batch["mask"].sum()
    trainer = sparsejax.data_parallel(loss_fn, tx, mesh_of(n), **options)
    state = trainer.init(PARAMS)
    for step in range(steps):
        state, loss = trainer.step(state, batch_of(step, n))
    return state, loss


@pytest.mark.slow
def test_a_run_by_rows_is_the_dense_run():
    seen = []
    chain = sparsejax.skip_nonfinite(optax.chain(ZEN, sgd_of_rows(seen)))
    state, loss = trained(optax.chain(sparsejax.transforms.clip_by_rank(50.0), chain), 3)
    assert {"users": True, "items": True, "kernel": False} in seen
    dense = optax.chain(
        sparsejax.transforms.clip_by_rank(50.0), sparsejax.dense_sync(), optax.sgd(0.1)
    )
    want, want_loss = trained(dense, 3)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for name, got in state.params.items():
        np.testing.assert_allclose(got, want.params[name], rtol=1e-5, atol=1e-6)
        assert (np.asarray(got) != 1).any()
    # The rank that has no data lists no rows.
    listed = {
        name: len({*batch_of(1, 3)[name][:16].tolist()}) for name in ("users", "items")
    }
    share = sparsejax.metrics(state.opt_state)["sync/items and 1 more/density_after"]
    # Both tables are one exchange, whose density is that of all their rows.
    both = (listed["users"] + listed["items"]) / 9_000
    np.testing.assert_allclose(share, both, rtol=1e-6)


@pytest.mark.slow
def test_a_run_with_a_capacity_is_the_dense_run():
    """The rank that has data reads 8 ids, some steps of more than 4 distinct users."""
    distinct = [len({*batch_of(step, 2)["users"][:8].tolist()}) for step in range(3)]
    assert {count > 4 for count in distinct} == {True, False}
    seen = []
    tx = optax.chain(ZEN, sgd_of_rows(seen))
    state, loss = trained(tx, 2, 3, capacity={"users": 4})
    assert {"users": True, "items": True, "kernel": False} in seen
    want, want_loss = trained(optax.chain(sparsejax.dense_sync(), optax.sgd(0.1)), 2, 3)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for name, got in state.params.items():
        np.testing.assert_allclose(got, want.params[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(errors.RuleError, match="capacity of 'sellers' matches no leaf"):
        trained(tx, 2, capacity={"sellers": 4})


@pytest.mark.parametrize(
    ("capacity", "error", "match"),
    [
        ({"(": 3}, errors.RuleError, r"'\(' is not a regular expression"),
        ({3: 3}, errors.RuleError, "3 is not a regular expression"),
        (0, errors.ArgumentError, "capacity must be a positive int, got 0"),
        ({"users": 1.5}, errors.ArgumentError, "capacity of 'users' must be .* got 1.5"),
    ],
)
def test_a_capacity_that_cannot_be_one_is_refused_at_once(capacity, error, match):
    tx, mesh = optax.sgd(0.1), mesh_of(2)
    with pytest.raises(error, match=match):
        sparsejax.data_parallel(lambda params, batch: 0.0, tx, mesh, capacity=capacity)


def test_what_fails_with_arrays_too_is_not_blamed_on_rows():
    broken = optax.stateless(lambda updates, params: updates + "")
    tx = optax.chain(ZEN, broken, sparsejax.lazy(optax.sgd(0.1)))
    with pytest.raises(TypeError, match="unsupported operand") as caught:
        trained(tx, 2)
    assert not isinstance(caught.value, errors.SparsejaxError)


ROWS = sgd_of_rows([])


@pytest.mark.parametrize(
    ("tx", "paths"),
    [
        (optax.chain(ZEN, ROWS), {"users", "items", "kernel"}),
        (optax.chain(ZEN, sgd_of_rows([], ["users"])), {"users"}),
        (sparsejax.warm_up(optax.chain(ZEN, ROWS), 2), {"users", "items", "kernel"}),
        (optax.chain(ROWS, ZEN), set()),
        (optax.chain(ZEN, optax.adam(1e-3)), set()),
        (sparsejax.accumulate(optax.chain(ZEN, ROWS), 2), set()),
        (optax.chain(sparsejax.dgc(0.01), ZEN, ROWS), set()),
        (optax.chain(sparsejax.ok_topk_sync(0.01), ROWS), {"kernel"}),
    ],
    ids=["all", "one", "warm_up", "before", "none", "accumulate", "dgc", "lossy"],
)
def test_which_leaves_are_taken_by_rows(tx, paths):
    assert takes_rows(observing.observed(tx, PARAMS)) == paths


@pytest.mark.parametrize(
    "between", [optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1)]
)
def test_what_takes_no_rows_beside_lazy_is_refused_by_name(between):
    tx = optax.chain(ZEN, between, sparsejax.lazy(optax.sgd(0.1)))
    with pytest.raises(errors.LeafError, match=r"'items' is RowGrads.*clip_by_rank.*Error"):
        trained(tx, 2)
