"""A lookup in a table that is sharded by columns, as a module of flax.linen.

linen uses the class name of a module in paths of parameters: "ColumnEmbed_0".
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh

from sparsejax import axes
from sparsejax.embrace.column_lookup import column_lookup
from sparsejax.embrace.column_table import DEFAULT_INIT, ColumnTable, width
from sparsejax.placement import specs


class ColumnEmbed(nn.Module):
    """A `flax.linen.Embed` whose parameter, "embedding", is a `ColumnTable`.

    `init` runs outside of `shard_map`, and makes each device's columns on it; it returns
    vectors of zeros. `apply` runs inside `shard_map`.

    Attributes:
        num_embeddings: The number of rows.
        features: The number of columns.
        mesh: The mesh.
        axis_name: The mesh axis of the ranks, where the mesh has several axes.
        embedding_init: A function from a key, a shape and a dtype to values.
        param_dtype: The dtype of the table.
        capacity: See `sparsejax.column_lookup`.

    Example:
        >>> from sparsejax.embrace import linen
        >>> embed = linen.ColumnEmbed(num_embeddings=100, features=8, mesh=mesh)
        >>> params = embed.init(jax.random.key(0), jnp.arange(4))["params"]
        >>> params["embedding"].whole().shape
        (100, 8)
    """

    num_embeddings: int
    features: int
    mesh: Mesh
    axis_name: axes.AxisName | None = None
    embedding_init: Callable[..., jax.Array] = DEFAULT_INIT
    param_dtype: Any = jnp.float32
    capacity: int | None = None

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        """Returns the vectors of this rank's ids."""
        axis_name = specs.data_axis(self.mesh, self.axis_name, "ColumnEmbed")
        is_inside = set(axes.axis_names(axis_name)) <= set(axes.manual_axes())

        def create(key):
            make = lambda key: ColumnTable.create(
                key,
                self.num_embeddings,
                self.features,
                self.mesh,
                axis_name,
                init=self.embedding_init,
                dtype=self.param_dtype,
            )
            if not is_inside:
                return make(key)
            # linen compares shapes with those of the given parameter: this rank's columns.
            ranks = specs.ranks_of(self.mesh, axis_name)
            shape = (self.num_embeddings, width(self.features, ranks))
            return ColumnTable(jnp.zeros(shape, self.param_dtype), self.features, axis_name)

        table = self.param("embedding", create)
        if self.is_initializing():
            return jnp.zeros((*jnp.shape(ids), self.features), self.param_dtype)
        return column_lookup(table, ids, capacity=self.capacity)
