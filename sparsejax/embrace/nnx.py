"""A lookup in a table that is sharded by columns, as a module of flax.nnx.

`Embed` and `Optimizer` have the names of those of flax.nnx that they replace in a model.
`nnx.Optimizer` splits the state of an optimizer into arrays, and would not know which of
them are sharded: the `Optimizer` here keeps the nodes, and accepts `RowGrads`, too.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from sparsejax.axes import AxisName
from sparsejax.embrace.column_lookup import column_lookup
from sparsejax.embrace.column_table import DEFAULT_INIT, ColumnTable
from sparsejax.rows.apply import apply_updates


class Embed(nnx.Module):
    """A `flax.nnx.Embed` whose parameter, `embedding`, is a `ColumnTable`.

    It is made outside of `shard_map`, with each device's columns on it. It is called
    inside, where `nnx.merge` makes it with this rank's columns.

    Args:
        num_embeddings: The number of rows.
        features: The number of columns.
        mesh: The mesh.
        axis_name: The mesh axis of the ranks, where the mesh has several axes.
        embedding_init: A function from a key, a shape and a dtype to values.
        param_dtype: The dtype of the table.
        capacity: See `sparsejax.column_lookup`.
        rngs: The random number generators, of which "params" is used.

    Example:
        >>> from sparsejax.embrace import nnx as columns
        >>> embed = columns.Embed(100, 8, mesh, rngs=nnx.Rngs(0))
        >>> embed.embedding.get_value().whole().shape
        (100, 8)
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        mesh: Mesh,
        axis_name: AxisName | None = None,
        *,
        embedding_init: Callable[..., jax.Array] = DEFAULT_INIT,
        param_dtype: Any = jnp.float32,
        capacity: int | None = None,
        rngs: nnx.Rngs,
    ):
        table = ColumnTable.create(
            rngs.params(),
            num_embeddings,
            features,
            mesh,
            axis_name,
            init=embedding_init,
            dtype=param_dtype,
        )
        self.embedding = nnx.Param(table)
        self.capacity = capacity

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Returns the vectors of this rank's ids."""
        return column_lookup(self.embedding.get_value(), ids, capacity=self.capacity)


class Optimizer(nnx.Optimizer):
    """An `nnx.Optimizer` for models with an `Embed`, or with gradients by rows.

    It is made and called like `nnx.Optimizer`. `sparsejax.bind` makes its state.

    Args:
        model: The model.
        tx: The optimizer, from `sparsejax.bind`.
        wrt: The kind of variables that are trained, such as `nnx.Param`.

    Example:
        >>> from sparsejax.embrace import nnx as columns
        >>> model = columns.Embed(100, 8, mesh, rngs=nnx.Rngs(0))
        >>> tx = sparsejax.bind(optax.chain(sparsejax.dense_sync(), optax.sgd(0.1)), mesh)
        >>> optimizer = columns.Optimizer(model, tx, wrt=nnx.Param)
    """

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        """Updates the model and the optimizer's state in place.

        Args:
            model: The model, which is changed.
            grads: The gradients of its trained variables.
            **kwargs: Further arguments of the transformation's `update`.

        Returns:
            The updates.
        """
        params = nnx.as_pure(nnx.state(model, self.wrt))
        variables, structure = jax.tree.flatten(self.opt_state, is_leaf=_is_variable)
        before = nnx.as_pure(self.opt_state)
        updates, after = self.tx.update(nnx.as_pure(grads), before, params, **kwargs)
        nnx.update(model, apply_updates(params, updates))
        for variable, value in zip(variables, structure.flatten_up_to(after), strict=True):
            variable.set_value(value)
        self.step[...] += 1
        return updates


def _is_variable(node):
    return isinstance(node, nnx.Variable)
