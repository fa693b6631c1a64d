"""The sum of the messages of all ranks: in rank order, in float32, the same on all ranks.

Messages are read one after another, each added to the sums of the ranks before it. A
message has each index once, so the order of the sum is that of the ranks, and all ranks
compute the same bits.

    ranks     sum over ranks of w x / sum over ranks of w
    senders   sum over ranks of w x / sum of w over the ranks that sent that index

A rank that sent 0 is no sender: a block of zeros, too, has entries in a message.
Weights w are 1 where none are given; what no rank has sent is 0. A weight of 0 takes a
rank out of both sums, whatever its values are.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.chunked.message import RankMessage, Selected


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """How the messages of ranks become one update.

    Attributes:
        unpack: What a message says of each leaf, or of each group of an owner's blocks.
        sizes: The numbers of each of these.
        ranks: How many ranks.
        senders: Whether an element is divided by the weight of its senders.
        mean: Whether the result is the mean; else that times the number of ranks.
    """

    unpack: Callable[[jax.Array], list[Selected]]
    sizes: tuple[int, ...]
    ranks: int
    senders: bool
    mean: bool

    def __call__(
        self, words: jax.Array, weights: jax.Array | None, scales: jax.Array | None
    ) -> list[jax.Array]:
        """The mean of each leaf, float32 and flat.

        Args:
            words: uint32 [ranks, words].
            weights: float32 [ranks], or None for 1.
            scales: float32 [ranks, leaves] by which values are multiplied, or None for 1.
        """
        counted = jnp.uint8 if self.ranks < 256 else jnp.int32
        counted = counted if weights is None else jnp.float32
        totals = [jnp.zeros(size, jnp.float32) for size in self.sizes]
        counts = [jnp.zeros(size, counted) for size in self.sizes if self.senders]
        over = varying_axes(words)
        start = as_varying((totals, counts), over) if over else (totals, counts)

        def add(carry, given):
            (totals, counts), (words, weight, scale) = carry, given
            sent = self.unpack(words)
            return self._added(totals, counts, sent, weight, scale), None

        (totals, counts), _ = lax.scan(add, start, (words, weights, scales))
        if self.senders:
            return [
                self._divided(x, count.astype(jnp.float32))
                for x, count in zip(totals, counts, strict=True)
            ]
        if weights is None:
            return [x / self.ranks if self.mean else x for x in totals]
        return [self._divided(x, jnp.sum(weights)) for x in totals]

    def _added(self, totals, counts, sent: Sequence[Selected], weight, scale):
        """The sums with one more message."""
        for i, (at, x) in enumerate(sent):
            x = x if scale is None else x * scale[i]
            x = x if weight is None else jnp.where(weight == 0, 0, weight * x)
            totals[i] = _add(totals[i], at, x)
            if self.senders:
                one = jnp.asarray(1 if weight is None else weight, counts[i].dtype)
                counts[i] = _add(counts[i], at, jnp.where(x != 0, one, 0))
        return totals, counts

    def _divided(self, x, weight):
        """A sum over its weight; 0 where nothing counts."""
        x = x / jnp.where(weight == 0, 1, weight)
        return x if self.mean else x * self.ranks


def clipping(
    message: RankMessage, words: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """By what to scale the leaves of each rank, float32 [ranks, leaves].

    So the norm of what a rank sends of a leaf is at most the median over the ranks whose
    weight is not 0; what is not finite stays so.
    """

    def norms(words):
        squares = [jnp.sum(jnp.square(x)) for _, x in message.unpack(words)]
        return jnp.sqrt(jnp.stack(squares))

    each = lax.map(norms, words)
    counted = each if weights is None else jnp.where(weights[:, None] == 0, jnp.nan, each)
    median = jnp.nanmedian(counted, axis=0)
    return jnp.where(each > median, median / jnp.where(each > 0, each, 1), 1)


def _add(x, at, values):
    return x.at[at].add(values, mode="promise_in_bounds", unique_indices=True)
