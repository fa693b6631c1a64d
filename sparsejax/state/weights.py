"""How much each rank counts in a mean over the ranks.

On the wire: one number a rank, summed over the ranks, beside what is exchanged.

Each rank multiplies what it has by w ranks / sum of w. The plain mean over the ranks, by
whatever sends it, is then

    sum over ranks of w x / sum over ranks of w

and where all weights are 1 it is the mean without weights, bit for bit. A rank of weight 0
gives zeros, whatever it has; where all weights are 0 the mean is 0. A rank cannot count
less than nothing: of a weight below 0 the mean is NaN, which shows it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.errors import ArgumentError
from sparsejax.state import tree
from sparsejax.units.indices import comparable
from sparsejax.units.row_grads import RowGrads, is_row_grads
from sparsejax.units.units import wide
from sparsejax.wire.collectives import Wire


class Weight(NamedTuple):
    """How much this rank counts.

    Attributes:
        own: This rank's weight, float32; it differs by rank.
        total: The sum over the ranks.
        ranks: How many there are.
    """

    own: jax.Array
    total: jax.Array
    ranks: int

    @classmethod
    def of(cls, weight: Any, wire: Wire) -> "Weight":
        """From what a caller gives; see `own_weight`."""
        own = own_weight(weight, wire)
        return cls(own, wire.psum(own)[0], wire.ranks)

    def scaled(self, x: jax.Array) -> jax.Array:
        """An array whose plain mean over the ranks is the weighted one, in its dtype."""
        own, total = (one.astype(wide(x.dtype)) for one in (self.own, self.total))
        scale = own * self.ranks / jnp.where(total == 0, 1, total)
        scaled = (x.astype(scale.dtype) * scale).astype(x.dtype)
        # A weight that is NaN must show.
        return jnp.where(self.own == 0, jnp.zeros_like(scaled), scaled)

    def of_leaf(self, leaf: Any) -> Any:
        """A gradient of any kind, scaled; a rank of weight 0 lists no rows."""
        numbers = self.scaled(tree.numbers(leaf))
        if not is_row_grads(leaf):
            return tree.with_numbers(leaf, numbers)
        ids = jnp.where(self.own == 0, leaf.shape[0], comparable(leaf.ids))
        return RowGrads.marked(ids, numbers, leaf.shape)


def own_weight(weight: Any, wire: Wire) -> jax.Array:
    """This rank's weight as a float32 that differs by rank.

    Args:
        weight: One number of this rank, or [ranks] all of them.
        wire: The ranks.
    """
    weight = jnp.asarray(weight, jnp.float32)
    if weight.shape not in ((), (1,), (wire.ranks,)):
        raise ArgumentError(
            f"weight must be one number of this rank, or one for each of {wire.ranks} "
            f"ranks, got the shape {list(weight.shape)}."
        )
    weight = wire.per_rank(jnp.where(weight < 0, jnp.nan, weight))
    return weight[wire.rank] if weight.size > 1 else weight.reshape(())
