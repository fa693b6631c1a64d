"""Rows of gradients are the gradients that JAX gives, for losses as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from sparsejax import errors
from sparsejax.rows import lookup, value_and_grad
from sparsejax.units.row_grads import RowGrads, is_row_grads
from tests.rows import cases
from tests.rows.cases import CASES, IDS, take


def to_dense(grads):
    dense = lambda leaf: leaf.to_dense() if is_row_grads(leaf) else leaf
    return jax.tree.map(dense, grads, is_leaf=is_row_grads)


def assert_close(got, want, tolerance=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def both(loss, *args, has_aux=False, **kwargs):
    """Of a loss: the value and gradients by rows, and those of JAX, in one program."""
    ours = value_and_grad(loss, has_aux=has_aux)
    theirs = jax.value_and_grad(loss, has_aux=has_aux)
    run = jax.jit(lambda *args: (ours(*args, **kwargs), theirs(*args, **kwargs)))
    return run(*args)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_jax(name):
    case = CASES[name]
    loss = lambda p, ids: case.loss(take, p, ids)
    (value, grads), (want_value, want) = both(loss, cases.params(), jnp.asarray(IDS))
    table = grads["table"]
    assert is_row_grads(table) == (case.rows is not None)
    if is_row_grads(table):
        table.check("table")
        assert table.capacity == case.rows
    assert not any(map(is_row_grads, (grads["u"], grads["w"])))
    assert_close(value, want_value, case.tolerance)
    assert_close(to_dense(grads), want, case.tolerance)
