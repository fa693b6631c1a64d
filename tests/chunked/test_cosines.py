"""Blocks by their cosine coefficients: the formulas of DeMo, and nothing is lost."""

import functools

import numpy as np
import pytest

import sparsejax
from sparsejax import errors
from sparsejax.chunked import dct
from tests import helpers
from tests.chunked import reference, runs


BLOCKS = {"k": runs.K, "chunk": runs.CHUNK}
CASES = [("float32", "senders", 0.9, False), *helpers.slow(("2bit", "ranks", 0.95, True))]
EACH = pytest.mark.parametrize(("values", "over", "decay", "weighted"), CASES)
rounds = functools.partial(runs.rounds, transform="dct")


@pytest.mark.parametrize("size", [1, 2, 13, 64])
def test_the_basis_is_orthonormal_and_that_of_the_formula(size):
    found = dct.basis(size)
    np.testing.assert_allclose(found @ found.T, np.eye(size), atol=1e-14)
    frequency, place = np.arange(size)[:, None], np.arange(size)
    waves = np.cos(np.pi * frequency * (2 * place + 1) / (2 * size))
    scale = np.where(frequency == 0, 1, np.sqrt(2)) / np.sqrt(size)
    np.testing.assert_allclose(found, scale * waves, atol=1e-13)
    # What is zero but for rounding has no sign.
    assert (found[np.abs(found) < 1e-12] == 0).all()


@EACH
def test_rounds_are_those_of_the_formulas(values, over, decay, weighted):
    grads, weights, updates, held = rounds(values, over, decay, weighted)
    options = {"values": values, "over": over, "decay": decay, "transform": "dct"}
    totals, residuals = reference.rounds(grads, weights, **BLOCKS, **options)
    for name in grads:
        np.testing.assert_allclose(updates[name][0], totals[name], rtol=1e-4, atol=5e-6)
        np.testing.assert_allclose(held[name], residuals[name], rtol=1e-4, atol=5e-6)


@EACH
def test_nothing_is_lost(values, over, decay, weighted):
    """In float64, of coefficients: they are what is divided by its senders."""
    grads, weights, updates, held = rounds(values, over, decay, weighted)
    helpers.assert_same_on_all_ranks(updates)
    turned = lambda x: reference.cosines(x, **BLOCKS)
    for name, given in grads.items():
        left = held[name].astype(np.float64)
        before = np.concatenate([np.zeros_like(left[:1]), left[:-1]])
        sent = decay * before + np.swapaxes(given, 0, 1) - left
        sent = np.stack([[turned(x) for x in of_ranks] for of_ranks in sent])
        found, kept = reference.blocks_of(given.shape[2:], **BLOCKS)
        there = np.abs(sent.reshape(runs.ROUNDS, runs.RANKS, -1)) > 1e-4
        assert all((there[..., block].sum(-1) <= kept).all() for block in found)
        weight = weights.T.reshape(*weights.T.shape, *[1] * (sent.ndim - 2))
        counted = weight * (np.abs(sent) > 1e-4) if over == "senders" else weight
        divisor = np.broadcast_to(counted, sent.shape).sum(1)
        total = np.stack([turned(x) for x in updates[name][0].astype(np.float64)])
        np.testing.assert_allclose(divisor * total, (weight * sent).sum(1), 1e-5, 2e-5)


@pytest.mark.parametrize("weighted", [False, *helpers.slow(True)])
def test_what_is_not_finite_shows_in_its_block_and_does_not_stay(weighted):
    grads = {"w": runs.gradients()["whole"]}
    grads["w"][1, 1, 5, 7] = np.nan
    weights = np.ones((runs.RANKS, runs.ROUNDS), np.float32) if weighted else None
    if weighted:
        weights[1, 1] = 0  # it counts nothing, and keeps what is finite
    tx = sparsejax.chunked_sync(**BLOCKS, values="float32", transform="dct")
    updates, states = runs.ran(tx, grads, weights)
    bad = ~np.isfinite(updates["w"])
    wanted = np.zeros_like(bad)
    wanted[:, 1, :8, :8] = not weighted
    np.testing.assert_array_equal(bad, wanted)
    assert np.isfinite(states.residual.value["w"]).all()
    if weighted:
        held = states.residual.value["w"][1, :, 0]
        np.testing.assert_allclose(held[1, 9:], held[0, 9:] + grads["w"][1, 1, 9:], 1e-5)


def test_other_transforms_are_named():
    with pytest.raises(errors.ArgumentError, match="transform must be one of None, 'dct'"):
        sparsejax.chunked_sync(transform="fft")
