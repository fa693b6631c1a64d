"""Adagrad with one accumulator per row, as recommender models train their tables."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax.arguments import check_at_least
from sparsejax.rows.updates.lazy import Lazy, lazy
from sparsejax.transforms.described import described


class RowwiseState(NamedTuple):
    """State of `rowwise_adagrad`.

    Attributes:
        accumulators: A tree like the parameters. For a table, [height]: the sum of mean
            squares of each row; for a vector or a scalar, an array of its shape.
    """

    accumulators: Any


@described
def rowwise_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    eps: float = 1e-8,
    initial_accumulator: float = 0.0,
) -> Lazy:
    """Adagrad with one accumulator for each row: the sum of mean squares.

    With g a row of the gradient, and p the row of the parameter, each step does

        a = a + mean(g^2)
        p = p - learning_rate g / (sqrt(a) + eps)

    So a table of rows of 16 numbers has a sixteenth of Adagrad's state. A row without a
    gradient does not change, so `RowGrads` and arrays give the same parameters, and the
    cost of a step with `RowGrads` is that of its rows. Rows lie along the first axis.
    Parameters with fewer than two axes have an accumulator for each number.

    Args:
        learning_rate: A number or a schedule.
        eps: The number that is added to the root.
        initial_accumulator: The first value of all accumulators.

    Returns:
        A `Lazy`. Its updates of `RowGrads` are `RowGrads`.

    Example:
        >>> tx = optax.chain(sparsejax.zen_sync(), sparsejax.rows.rowwise_adagrad(0.1))
    """
    check_at_least("eps", eps)
    check_at_least("initial_accumulator", initial_accumulator)
    scale = _scale_by_rows(eps, initial_accumulator)
    return lazy(optax.chain(scale, optax.scale_by_learning_rate(learning_rate)))


def _scale_by_rows(eps, initial_accumulator):
    def init(params):
        one = lambda p: jnp.full(p.shape[:1], initial_accumulator, p.dtype)
        return RowwiseState(jax.tree.map(one, params))

    def update(updates, state, params=None):
        del params

        def summed(g, a):
            return a + jnp.mean(jnp.square(g), axis=range(1, g.ndim)).astype(a.dtype)

        def scaled(g, a):
            root = (jnp.sqrt(a) + eps).reshape(a.shape + (1,) * (g.ndim - a.ndim))
            # With eps 0 the root of a row whose gradients were all zero is zero.
            return jnp.where(root > 0, g / jnp.where(root > 0, root, 1), 0).astype(g.dtype)

        sums = jax.tree.map(summed, updates, state.accumulators)
        made = jax.tree.map(scaled, updates, sums)
        return made, RowwiseState(sums)

    return optax.GradientTransformation(init, update)
