"""Means and sums over the ranks, by the weights of their shares of a batch.

On the wire: a psum for each mean and each sum, and one for the weights, if any.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import axes
from sparsejax.errors import ArgumentError
from sparsejax.state.weights import Weight
from sparsejax.units.units import wide
from sparsejax.wire.collectives import Wire


@dataclasses.dataclass(frozen=True)
class Share:
    """The share of this rank in means over the ranks.

    Attributes:
        wire: The wire.
        weight: The weight of this rank; None if all ranks have equal weights.
    """

    wire: Wire
    weight: Weight | None = None

    @classmethod
    def of(cls, batch: Any, weight_of: Callable[[Any], Any] | None, wire: Wire) -> "Share":
        """Makes the share of this rank, by the weight of its part of a batch."""
        if weight_of is None:
            return cls(wire)
        weight = jnp.asarray(weight_of(batch))
        if weight.shape or not jnp.issubdtype(wide(weight.dtype), jnp.floating):
            raise ArgumentError(
                "weight must return one number for a rank's share of the batch, got "
                f"{weight.dtype}{list(weight.shape)}. Of a mask that is its sum: "
                "weight=lambda batch: batch['mask'].sum()."
            )
        return cls(wire, Weight.of(weight, wire))

    def scaled(self, x: jax.Array) -> jax.Array:
        """Scales an array so that its plain mean over the ranks is the weighted mean.

        On a rank of weight 0 it returns zeros, even if x is not finite there.
        """
        return x if self.weight is None else self.weight.scaled(x)

    def mean(self, x: jax.Array) -> jax.Array:
        """Returns the weighted mean over ranks, in float32 or wider; NaN if none counts."""
        x = self.scaled(jnp.asarray(x, wide(jnp.result_type(x))))
        mean = self.wire.psum(self.wire.per_rank(x))[0] / self.wire.ranks
        return self._where_any(mean, jnp.nan)

    def sum(self, x: jax.Array) -> jax.Array:
        """Returns the sum over ranks of weight > 0; for integers and flags an integer."""
        dtype = jnp.result_type(x)
        is_float = jnp.issubdtype(dtype, jnp.inexact)
        to = wide(dtype) if is_float else jnp.promote_types(dtype, jnp.int32)
        x = jnp.asarray(x, to)
        if self.weight is not None:
            x = jnp.where(self.weight.own > 0, x, jnp.zeros_like(x))
        return self.wire.psum(self.wire.per_rank(x))[0]

    def of_all(self, new: jax.Array, old: jax.Array) -> jax.Array:
        """Returns the mean in the old value's dtype; the old value if no rank counts."""
        mean = self.mean(new).astype(old.dtype)
        return self._where_any(mean, old)

    def own(self, new: jax.Array, old: jax.Array) -> jax.Array:
        """Returns this rank's new value; the old one if its weight is 0."""
        return new if self.weight is None else jnp.where(self.weight.own > 0, new, old)

    def _where_any(self, x, otherwise):
        """Returns the array, or `otherwise` if the weights of all ranks are 0."""
        return x if self.weight is None else jnp.where(self.weight.total == 0, otherwise, x)

    def require_same_elsewhere(self, what: str, x: Any) -> None:
        """Raises if x varies over a mesh axis that is not one of the ranks."""
        further = sorted(axes.varying_axes(x) - set(axes.axis_names(self.wire.axis)))
        if further:
            raise ArgumentError(
                f"{what} differs over {further[0]!r}, which shards the parameters: add it "
                f"up there, lax.psum(..., {further[0]!r})."
            )
