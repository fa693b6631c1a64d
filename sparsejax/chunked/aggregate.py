"""Sums the messages of all ranks in rank order, in float32, with equal results on all.

Messages are read one after another, and each is added to the sum of the ranks before it. An
index occurs at most once in a message, so values are added in the order of the ranks, and
all ranks compute the same bits.

    ranks     sum over ranks of w x / sum over ranks of w
    senders   sum over ranks of w x / sum of w over the ranks that sent that index

A rank that sent the value 0 does not count as a sender: even a block of zeros has entries
in a message. Weights w are 1 if none are given. An element that no rank has sent is 0. A
rank of weight 0 is excluded from both sums, even if its values are not finite.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.chunked.message import RankMessage, Selected
from sparsejax.units.selection import magnitudes


_AT_ONCE = 2  # the number of leaves whose sums may be computed at the same time


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """Combines the messages of all ranks into one update.

    Attributes:
        unpack: A function of a message, uint32 [words], that returns the entries of each
            leaf, or of each group of an owner's blocks.
        sizes: The number of elements of each of these.
        ranks: The number of ranks.
        senders: Whether an element is divided by the weight of its senders; else by that
            of all ranks.
        mean: Whether the result is the mean; else the mean times the number of ranks.
    """

    unpack: Callable[[jax.Array], list[Selected]]
    sizes: tuple[int, ...]
    ranks: int
    senders: bool
    mean: bool

    def __call__(
        self, words: jax.Array, weights: jax.Array | None, scales: jax.Array | None
    ) -> list[jax.Array]:
        """Returns the mean of each leaf, flat float32.

        Args:
            words: uint32 [ranks, words], the messages.
            weights: float32 [ranks], the weights of ranks, or None for 1.
            scales: float32 [ranks, leaves], the factors of values, or None for 1.
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
        """Sums a leaf over all ranks; returns the sum and the weights of the senders.

        Args:
            start: float32 [size] of zeros.
            sent: The entries of all ranks, with a leading axis for the rank.
            weights: float32 [ranks], or None for 1.
            scales: float32 [ranks], or None for 1.
        """
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
        """Divides a sum by its weight; returns 0 where the weight is 0."""
        x = x / jnp.where(weight == 0, 1, weight)
        return x if self.mean else x * self.ranks


def clipping(
    message: RankMessage, words: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Returns the factors that clip the leaves of each rank, float32 [ranks, leaves].

    They scale the norm of the entries that a rank sends of a leaf to at most the median
    over the ranks whose weight is not 0. Values that are not finite stay so.
    """

    def norms(words):
        squares = [jnp.sum(jnp.square(x)) for _, x in message.unpack(words)]
        return jnp.sqrt(jnp.stack(squares))

    each = lax.map(norms, words)
    counted = each if weights is None else jnp.where(weights[:, None] == 0, jnp.nan, each)
    median = jnp.nanmedian(counted, axis=0)
    return jnp.where(each > median, median / jnp.where(each > 0, each, 1), 1)


def _zeros_after(found, size):
    """Returns float32 [size] of zeros that depend on the first of some arrays.

    Otherwise XLA would write the zeros of all leaves first, and hold all sums in memory at
    the same time, although most are added to parameters one by one. It cannot infer that
    the number on which they depend is never negative.
    """
    numbers = [x[:1] for x in found if x.size]
    if len(numbers) < _AT_ONCE:
        return jnp.zeros(size, jnp.float32)
    sign = lax.bitcast_convert_type(magnitudes.keys(numbers[0]), jnp.int32)
    return jnp.broadcast_to(jnp.where(sign >= 0, jnp.float32(0), 1), size)


def _add(x, at, values):
    return x.at[at].add(values, mode="promise_in_bounds", unique_indices=True)
