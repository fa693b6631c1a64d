"""Blocks by their cosine coefficients: the formula of DeMo; their rounds: `test_laws`."""

import numpy as np
import pytest

import sparsejax
from sparsejax import errors
from sparsejax.chunked import dct
from tests import helpers
from tests.chunked import runs


BLOCKS = {"k": runs.K, "chunk": runs.CHUNK}


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
