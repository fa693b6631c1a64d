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
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.chunked.message import RankMessage, Selected
from sparsejax.units.selection import magnitudes


_AT_ONCE = 2  # leaves that are added up at once


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
        sent = lax.map(self.unpack, words)
        sums: list[jax.Array] = []
        found = []
        for i, size in enumerate(self.sizes):
            start = _zeros_after(sums[-_AT_ONCE:], size)
            scale = None if scales is None else scales[:, i]
            total, count = self._summed(start, sent[i], weights, scale)
            sums.append(total)
            if count is not None:
                total = self._divided(total, count.astype(jnp.float32))
            elif weights is not None:
                total = self._divided(total, jnp.sum(weights))
            elif self.mean:
                total = total / self.ranks
            found.append(total)
        return found

    def _summed(self, start, sent: Selected, weights, scales):
        """The sum of a leaf over all ranks, from zeros, and the weight of its senders."""
        counted = jnp.uint8 if self.ranks < 256 else jnp.int32
        counted = counted if weights is None else jnp.float32
        count = start.astype(counted) if self.senders else None
        over = varying_axes(sent.indices) | varying_axes(sent.values)
        carry = as_varying((start, count), over) if over else (start, count)

        def add(carry, given):
            (total, count), ((at, x), weight, scale) = carry, given
            x = x if scale is None else x * scale
            x = x if weight is None else jnp.where(weight == 0, 0, weight * x)
            total = _add(total, at, x)
            if count is not None:
                one = jnp.asarray(1 if weight is None else weight, count.dtype)
                count = _add(count, at, jnp.where(x != 0, one, 0))
            return (total, count), None

        return lax.scan(add, carry, (sent, weights, scales))[0]

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


def _zeros_after(found, size):
    """Zeros that are there once the first of some arrays is.

    XLA would write the zeros of all leaves first, and have all sums at once, where most are
    added to parameters one by one. It does not know that the number here is never negative.
    """
    numbers = [x[:1] for x in found if x.size]
    if len(numbers) < _AT_ONCE:
        return jnp.zeros(size, jnp.float32)
    sign = lax.bitcast_convert_type(magnitudes.keys(numbers[0]), jnp.int32)
    return jnp.broadcast_to(jnp.where(sign >= 0, jnp.float32(0), 1), size)


def _add(x, at, values):
    return x.at[at].add(values, mode="promise_in_bounds", unique_indices=True)
