"""Adds updates to parameters and writes rows into arrays, both in place."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax.state import tree
from sparsejax.units.row_grads import is_row_grads


def apply_updates(params: Any, updates: Any) -> Any:
    """Applies updates, as `optax.apply_updates` does, of which some may be `RowGrads`.

    Rows are added to those of the table; rows with equal ids are added one after another.
    Inside `jax.jit` with donated parameters, no array of the table's size is allocated,
    read or written.

    Args:
        params: The parameters.
        updates: A tree like the parameters, with arrays or `RowGrads`. None and
            `optax.MaskedNode` change nothing.

    Returns:
        The parameters with the updates added to them, in their own dtypes.

    Raises:
        ArgumentError: A transformation has computed with the ids of rows, as `optax.scale`
            after `sparsejax.lazy` does, or they are rows of another table.

    Example:
        >>> rows = sparsejax.RowGrads(jnp.array([1]), jnp.ones((1, 2)), shape=(3, 2))
        >>> tables = {"users": jnp.zeros((3, 2))}
        >>> sparsejax.apply_updates(tables, {"users": rows})["users"].tolist()
        [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    """

    def one(keys, param, update):
        if update is None or isinstance(update, optax.MaskedNode):
            return param
        if not is_row_grads(update):
            return optax.apply_updates(param, update)
        return update.added_to(param, f"apply_updates: the update of {tree.named(keys)!r}")

    is_leaf = lambda node: node is None or isinstance(node, optax.MaskedNode)
    return jax.tree_util.tree_map_with_path(one, params, updates, is_leaf=is_leaf)


def written(whole: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns an array with some of its rows overwritten.

    Args:
        whole: [height, ...], the array.
        ids: int32 [n], distinct and ascending, except for padding: ids of at least the
            height, whose rows are dropped.
        rows: [n, ...], the rows to write.
    """
    height, n = whole.shape[0], ids.shape[0]
    distinct = height + n < 2**31
    if distinct:
        ids = jnp.where(ids < height, ids, height + jnp.arange(n, dtype=jnp.int32))
    return whole.at[ids].set(
        rows.astype(whole.dtype),
        mode="drop",
        indices_are_sorted=True,
        unique_indices=distinct,
    )


def after(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns an array of integers unchanged, with a data dependency on `rows`.

    The update of rows depends on all reads of the state in the step, those of the loss
    included. A write at numbers that depend on the update follows those reads, and is done
    in place; without the dependency XLA would copy the array first.
    """
    flag = jnp.signbit(rows.reshape(rows.shape[0], -1)[:, 0]).astype(x.dtype)
    return x + jnp.minimum(flag, 0)
