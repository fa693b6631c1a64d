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
    return marked(table, ids, "sparsejax.lookup", mode=mode, fill_value=fill_value)


def marked(table: jax.Array, ids: jax.Array, call: str, **options: Any) -> jax.Array:
    """Returns rows of a table that is marked as read by a public function.

    Args:
        table: The table.
        ids: The ids.
        call: The name of the function, for messages.
        **options: Those of `jnp.take`.
    """
    return jnp.take(_marker.bind(table, call=call), ids, axis=0, **options)


def marker_of(eqn: Any) -> str | None:
    """Returns the function whose table an equation marks; None for another equation."""
    return eqn.params["call"] if eqn.primitive is _marker else None


_marker = Primitive("sparsejax_lookup")
_said: set[str] = set()

# JAX attributes a lookup to the line of the model that calls it, not to this file.
source_info_util.register_exclusion(__file__)


@_marker.def_impl
def _(table, *, call):
    del call
    return table


@_marker.def_abstract_eval
def _(table, *, call):
    del call
    return table


def _differentiate(primals, tangents, *, call):
    (table,), (tangent,) = primals, tangents
    what = f"{call} of a table {table.dtype}{list(table.shape)}"
    if what not in _said:
        _said.add(what)
        warnings.warn(
            f"{what} is differentiated by something else than sparsejax.value_and_grad, or "
            "the table is computed from parameters: its gradient is dense. Take the "
            "gradient with sparsejax.value_and_grad(loss_fn), as sparsejax.data_parallel "
            "does for what sparsejax.lazy updates, and give "
            f"{call.removeprefix('sparsejax.')} the parameter itself.",
            DenseGradientWarning,
            stacklevel=2,
        )
    return _marker.bind(table, call=call), tangent


def _batched(tables, dims, *, call):
    return _marker.bind(*tables, call=call), dims[0]


ad.primitive_jvps[_marker] = _differentiate
batching.primitive_batchers[_marker] = _batched
mlir.register_lowering(_marker, lambda ctx, table, *, call: [table])
