"""A lookup of rows that is marked as one, and raises where its gradient would be dense.

The marker is a primitive in the program: an identity of the table that compiles to
nothing. `value_and_grad` finds it in the program that it traces. If other code
differentiates the program, the marker's JVP rule warns that the gradient is dense.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from sparsejax.errors import ArgumentError, DenseGradientWarning


def lookup(
    table: jax.Array, ids: Any, *, mode: str | None = None, fill_value: Any = None
) -> jax.Array:
    """Returns rows of a table, as `jnp.take(table, ids, axis=0)` does.

    Models do not need it: under `sparsejax.value_and_grad` any lookup can give a table
    `RowGrads`. This one demands them. The gradient then always has the rows that were
    read, and any other use of the table, which would make it dense, raises an error that
    names the use. Elsewhere it is `jnp.take`, whose gradient is dense; it warns so once.

    Args:
        table: [height, ...], of at least two axes.
        ids: Integers of any shape.
        mode: For ids out of range, as in `jnp.take`.
        fill_value: For ids out of range, as in `jnp.take`.

    Returns:
        The rows, of the shape `[*ids.shape, *table.shape[1:]]`.

    Raises:
        ArgumentError: ids are not integers, or the table has fewer than two axes.

    Example:
        >>> table = jnp.arange(6.0).reshape(3, 2)
        >>> sparsejax.lookup(table, jnp.array([2, 0])).tolist()
        [[4.0, 5.0], [0.0, 1.0]]

    See Also:
        `sparsejax.column_lookup`: rows of tables that are sharded by columns.
    """
    table, ids = jnp.asarray(table), jnp.asarray(ids)
    if table.ndim < 2:
        raise ArgumentError(
            "lookup: table must have at least two axes, rows and what a row holds, got the "
            f"shape {list(table.shape)}. Give it one of length 1, table[:, None], where it "
            "is made, or read numbers with table[ids]."
        )
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ArgumentError(
            f"lookup: ids must be integers, got {ids.dtype}{list(ids.shape)}. Cast them, "
            "ids.astype(jnp.int32), if they are whole numbers; use jnp.nonzero for flags."
        )
    marked = _marker.bind(table)
    return jnp.take(marked, ids, axis=0, mode=mode, fill_value=fill_value)


def is_marker(eqn: Any) -> bool:
    """Returns whether an equation marks the table of a lookup."""
    return eqn.primitive is _marker


_marker = Primitive("sparsejax_lookup")
_said: set[str] = set()

# JAX attributes a lookup to the line of the model that calls it, not to this file.
source_info_util.register_exclusion(__file__)


@_marker.def_impl
def _(table):
    return table


@_marker.def_abstract_eval
def _(table):
    return table


def _differentiate(primals, tangents):
    (table,), (tangent,) = primals, tangents
    kind = f"{table.dtype}{list(table.shape)}"
    if kind not in _said:
        _said.add(kind)
        warnings.warn(
            f"sparsejax.lookup of a table {kind} is differentiated by something else than "
            "sparsejax.value_and_grad, or the table is computed from parameters: its "
            "gradient is dense. Take the gradient with sparsejax.value_and_grad(loss_fn), "
            "and give lookup the parameter itself.",
            DenseGradientWarning,
            stacklevel=2,
        )
    return _marker.bind(table), tangent


ad.primitive_jvps[_marker] = _differentiate
batching.primitive_batchers[_marker] = lambda args, dims: (_marker.bind(*args), dims[0])
mlir.register_lowering(_marker, lambda ctx, table: [table])
