"""Weights of ranks in a mean over the ranks.

On the wire: one float32 of each rank, summed over the ranks, in addition to the exchange.

Each rank multiplies its gradient by w ranks / sum of w. The plain mean over the ranks, by
any scheme, is then

    sum over ranks of w x / sum over ranks of w

and if all weights are 1 it equals the mean without weights, bit for bit. A rank of weight 0
contributes zeros, whatever its gradient; if all weights are 0 the mean is 0. Negative
weights are invalid: they make the mean NaN, because nothing can be raised here.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sparsejax.axes import axis_names, varying_axes
from sparsejax.errors import ArgumentError
from sparsejax.state import tree
from sparsejax.units.indices import comparable
from sparsejax.units.row_grads import RowGrads, is_row_grads
from sparsejax.units.units import wide
from sparsejax.wire.collectives import Wire


class Weight(NamedTuple):
    """The weight of this rank, and the sum over all.

    Attributes:
        own: float32: this rank's weight; it varies over the ranks.
        total: float32: the sum of the weights of all ranks.
        ranks: The number of ranks.
    """

    own: jax.Array
    total: jax.Array
    ranks: int

    @classmethod
    def of(cls, weight: Any, wire: Wire) -> "Weight":
        """Makes it of the argument `weight` of `update`; see `own_weight`."""
        own = own_weight(weight, wire)
        return cls(own, wire.psum(own)[0], wire.ranks)

    def scaled(self, x: jax.Array) -> jax.Array:
        """Scales x, in its dtype, so that the plain mean over ranks is the weighted one."""
        own, total = (one.astype(wide(x.dtype)) for one in (self.own, self.total))
        scale = own * self.ranks / jnp.where(total == 0, 1, total)
        scaled = (x.astype(scale.dtype) * scale).astype(x.dtype)
        # A weight that is NaN is not 0: the result is NaN, which shows it.
        return jnp.where(self.own == 0, jnp.zeros_like(scaled), scaled)

    def of_leaf(self, leaf: Any) -> Any:
        """Scales a gradient of any kind; a rank of weight 0 lists no rows."""
        numbers = self.scaled(tree.numbers(leaf))
        if not is_row_grads(leaf):
            return tree.with_numbers(leaf, numbers)
        ids = jnp.where(self.own == 0, leaf.shape[0], comparable(leaf.ids))
        return RowGrads.marked(ids, numbers, leaf.shape)


def own_weight(weight: Any, wire: Wire) -> jax.Array:
    """Returns this rank's weight, a float32 that varies over the ranks.

    Args:
        weight: This rank's weight, a scalar or [1], or [ranks] the weights of all.
        wire: The ranks.
    """
    weight = _checked(weight, wire.ranks)
    if weight.size > 1 and varying_axes(weight) & {*axis_names(wire.axis)}:
        raise ArgumentError(
            f"weight has {wire.ranks} numbers, as many as there are ranks, and by its type "
            "they differ by rank, as those of the examples of a batch do: give one number "
            "of this rank, weight.sum() of examples, or weight[rank] of all ranks' weights."
        )
    weight = wire.per_rank(jnp.where(weight < 0, jnp.nan, weight))
    return weight[wire.rank] if weight.size > 1 else weight.reshape(())


def replicated(weight: Any, ranks: int, mesh: Mesh | AbstractMesh) -> jax.Array:
    """Returns the weights of all ranks under `jit`, replicated over a mesh.

    Of a sharded array each device would have a part, whose shape says nothing of the ranks.
    """
    return jax.reshard(_checked(weight, ranks), NamedSharding(mesh, PartitionSpec()))


def _checked(weight, ranks):
    weight = jnp.asarray(weight, jnp.float32)
    if weight.shape not in ((), (1,), (ranks,)):
        raise ArgumentError(
            f"weight must be one number of this rank, or one for each of {ranks} ranks, "
            f"got the shape {list(weight.shape)}."
        )
    return weight
