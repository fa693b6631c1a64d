"""Five rounds on three ranks are those of the formulas, and nothing is lost on the way."""

import functools

import jax
import numpy as np
import pytest

import sparsejax
from tests import helpers
from tests.chunked import reference, runs


BLOCKS = {"k": runs.K, "chunk": runs.CHUNK}
# Codes, what is divided by, decay, whether weighted, of numbers or of coefficients.
CASES = [
    ("float32", "senders", 0.5, True, {}),
    ("float32", "senders", 0.9, False, {"transform": "dct"}),
    *helpers.slow(
        ("2bit", "senders", 0.95, False, {}),
        ("2bit-bins", "ranks", 1.0, True, {}),
        ("2bit", "ranks", 0.95, True, {"transform": "dct"}),
    ),
]
each = pytest.mark.parametrize(("values", "over", "decay", "weighted", "of"), CASES)


@each
def test_rounds_are_those_of_the_formulas(values, over, decay, weighted, of):
    grads, weights, updates, held = runs.rounds(values, over, decay, weighted, **of)
    options = {"values": values, "over": over, "decay": decay} | of
    totals, residuals = reference.rounds(grads, weights, **BLOCKS, **options)
    rtol, atol = (1e-4, 5e-6) if of else (2e-5, 2e-6)
    for name in grads:
        np.testing.assert_allclose(updates[name][0], totals[name], rtol, atol)
        np.testing.assert_allclose(held[name], residuals[name], rtol, atol)


@each
def test_nothing_is_lost(values, over, decay, weighted, of):
    """What a rank accumulates is what counts of it and what it holds, in float64.

    Coefficients, where there are some, are what is divided by its senders.
    """
    grads, weights, updates, held = runs.rounds(values, over, decay, weighted, **of)
    helpers.assert_same_on_all_ranks(updates)
    turned = (lambda x: reference.cosines(x, **BLOCKS)) if of else (lambda x: x)
    least, rtol, atol = (1e-4, 1e-5, 2e-5) if of else (1e-5, 1e-6, 4e-6)
    for name, given in grads.items():
        left = held[name].astype(np.float64)
        before = np.concatenate([np.zeros_like(left[:1]), left[:-1]])
        sent = decay * before + np.swapaxes(given, 0, 1) - left
        sent = np.stack([[turned(x) for x in of_ranks] for of_ranks in sent])
        found, kept = reference.blocks_of(given.shape[2:], **BLOCKS)
        there = np.abs(sent.reshape(runs.ROUNDS, runs.RANKS, -1)) > least
        assert all((there[..., block].sum(-1) <= kept).all() for block in found)
        weight = weights.T.reshape(*weights.T.shape, *[1] * (sent.ndim - 2))
        counted = weight * (np.abs(sent) > least) if over == "senders" else weight
        divisor = np.broadcast_to(counted, sent.shape).sum(1)
        total = np.stack([turned(x) for x in updates[name][0].astype(np.float64)])
        np.testing.assert_allclose(divisor * total, (weight * sent).sum(1), rtol, atol)
        # A rank of weight 0 keeps all.
        silent = np.broadcast_to(weight == 0, sent.shape)
        np.testing.assert_allclose(sent[silent], 0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("values", ["2bit", "float32"])
def test_doubles_beyond_float32_are_left_over(values):
    """One rank has 1e39: what a message cannot hold of it is in the residual."""
    grads = np.zeros((2, 1, 64))
    grads[0, 0, 5], grads[:, 0, 9] = 1e39, 1
    tx = sparsejax.chunked_sync(k=4, chunk=64, over="ranks", values=values, reduce="sum")
    for send in (tx, sparsejax.warm_up(tx, 1)):
        with jax.enable_x64(True):
            run = helpers.ranks(2)(send, {"w": grads})
            total = run.updates["w"][0, 0] + helpers.held(run.state)["w"]
        np.testing.assert_allclose(total[[5, 9]], [1e39, 2], rtol=1e-6)


@pytest.mark.slow
def test_doubles_below_float32_are_left_over_by_dense_steps():
    """With weights, too."""
    grads = np.random.default_rng(0).standard_normal((2, 1, 64)) * 1e-50
    tx = sparsejax.chunked_sync(k=4, chunk=64, reduce="sum")
    for options in ({}, {"weight": 3.0}):
        update = functools.partial(tx.update, dense=True, **options)
        with jax.enable_x64(True):
            run = helpers.ranks(2)(tx._replace(update=update), {"w": grads})
            total = run.updates["w"][0, 0] + helpers.held(run.state)["w"]
        np.testing.assert_allclose(total, grads.sum((0, 1)), rtol=1e-12)


@pytest.mark.slow
def test_what_two_bits_take_off_is_in_the_residual():
    """Where float32 leaves nothing of an entry, two bits leave what they round."""
    _, _, _, held = runs.rounds("2bit", "senders", 0.95, False)
    _, _, _, exact = runs.rounds("float32", "senders", 0.5, True)
    assert (exact["prime"][:, 0] == 0).all()  # blocks of one number are sent whole
    assert (held["prime"][0] != 0).mean() > 0.9


@pytest.mark.slow
def test_replicas_are_the_same_whether_types_are_checked_or_not():
    tx = runs.sync(k=runs.K, chunk=runs.CHUNK, decay=0.95)
    updates, states = runs.ran(tx, runs.gradients(), check_vma=False)
    helpers.assert_same_on_all_ranks((updates, states.norm, states.inner))
    _, _, wanted, _ = runs.rounds("2bit", "senders", 0.95, False)
    assert helpers.octets(updates) == helpers.octets(wanted)


@pytest.mark.slow
def test_a_rank_is_clipped_at_the_median_norm():
    grads, weights = runs.gradients(), runs.uneven()
    grads = {name: x.copy() for name, x in grads.items()}
    for x in grads.values():
        x[0] *= 100
    options = {"values": "float32", "over": "ranks", "decay": 0.9}
    tx = sparsejax.chunked_sync(clip_to_median=True, **BLOCKS, **options)
    updates, states = runs.ran(tx, grads, weights)
    helpers.assert_same_on_all_ranks(updates)
    found = reference.rounds(grads, weights, clip=True, **BLOCKS, **options)
    for name, total in found[0].items():
        np.testing.assert_allclose(updates[name][0], total, rtol=2e-5, atol=2e-5)
        held = np.swapaxes(states.residual.value[name][:, :, 0], 0, 1)
        np.testing.assert_allclose(held, found[1][name], rtol=2e-5, atol=2e-4)


@pytest.mark.slow
def test_a_sum_is_the_mean_times_the_ranks():
    options = {"k": runs.K, "chunk": runs.CHUNK, "decay": 0.95}
    summed, _ = runs.ran(sparsejax.chunked_sync(reduce="sum", **options), runs.gradients())
    _, _, mean, _ = runs.rounds("2bit", "senders", 0.95, False)
    for name, x in summed.items():
        np.testing.assert_allclose(x, runs.RANKS * mean[name], rtol=1e-6)
