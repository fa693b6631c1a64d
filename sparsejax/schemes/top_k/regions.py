"""Ok-Topk's regions: which rank adds up which elements, as many for each.

A region is a run of whole words of 32 elements, so that the packed bits of what was chosen
fall apart into those of the regions. No region is wider than four times the mean: its sum
has a buffer of fixed size. At worst a quarter of the ranks get what is empty, and the
others a third more.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import wire
from sparsejax.axes import as_varying, varying_axes
from sparsejax.units import bits, magnitudes
from sparsejax.wire import ladder


_WIDEST = 4  # regions, in multiples of the mean


class Regions(NamedTuple):
    """How elements are divided among ranks.

    Attributes:
        size: How many elements.
        ranks: How many ranks.
        words: Words of 32 elements.
        widest: Words of the widest region.
        k: How many elements are to be chosen.
        most: How many at most.
        room: Of how many a message of the split has room.
    """

    size: int
    ranks: int
    words: int
    widest: int
    k: int
    most: int
    room: int

    @property
    def width(self) -> int:
        """Elements of the widest region."""
        return self.widest * bits.WORD

    def even(self) -> jax.Array:
        """Regions of one width."""
        mean = -(-self.words // self.ranks)
        return jnp.minimum(jnp.arange(self.ranks, dtype=jnp.int32) * mean, self.words)

    def allowed(self, starts: jax.Array) -> jax.Array:
        """Bounds like these that leave no region wider than the widest."""
        at = jnp.arange(self.ranks, dtype=jnp.int32)
        # In order, too: where two are nearly the same, their rounded means need not be.
        starts = jnp.where(at == 0, 0, jnp.clip(starts, 0, self.words))
        starts = lax.cummax(starts)
        starts = jnp.maximum(starts, self.words - (self.ranks - at) * self.widest)
        # The least of all bounds before it, and as many widths as there are in between.
        return lax.cummin(starts - at * self.widest) + at * self.widest

    def split(self, dtype, code) -> ladder.Ladder:
        """Messages of the split."""
        least = self.k // (2 * self.ranks) + 1
        return ladder.exactly(
            self.width, dtype.itemsize, self.ranks, self.room, code, least
        )

    def pull(self, dtype, code, balance_at) -> ladder.Ladder:
        """Messages of the gather; beyond them the list is shorter."""
        most = min(self.most, math.ceil(balance_at * self.most / self.ranks))
        least = self.k // (2 * self.ranks) + 1
        return ladder.exactly(self.width, dtype.itemsize, 1, most, code, least)

    def wanted(self, words: jax.Array, axis_name: wire.AxisName) -> jax.Array:
        """Bounds where ranks would put them on average, for regions of as many elements.

        Args:
            words: What this rank has chosen, packed.
            axis_name: The axis.
        """
        index = bits.rank_index(words, self.ranks)
        count = index.row_end[-1]
        at = jnp.arange(self.ranks, dtype=jnp.int32)
        first = (at.astype(jnp.float32) * count / self.ranks).astype(jnp.int32)
        here = bits.select(index, first, 1)[:, 0] // bits.WORD
        own = jnp.where(count > 0, here, self.even()).astype(jnp.float32)
        # Not as integers, whose sum might not fit. All ranks have the same sum.
        total, _ = wire.psum(wire.per_rank(own, axis_name), axis_name)
        return self.allowed(jnp.round(total / self.ranks).astype(jnp.int32))

    def fitted(
        self, x: jax.Array, words: jax.Array, starts: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """What goes to each region, no more than there is room for.

        Args:
            x: The array.
            words: What was chosen of it, packed.
            starts: Of the regions.
            seed: Which of equal ones, where not all fit.

        Returns:
            The packed bits of each region [ranks, widest], and all of them as one set.
        """
        ends = jnp.concatenate([starts[1:], jnp.full(1, self.words, jnp.int32)])
        at = starts[:, None] + lax.iota(jnp.int32, self.widest)
        inside = at < ends[:, None]

        def divided(words):
            return jnp.where(inside, words.at[at].get(mode="clip"), 0), words

        parts, _ = divided(words)
        counts = jnp.sum(lax.population_count(parts), axis=1, dtype=jnp.int32)
        axes = varying_axes(parts) | varying_axes(x)
        fewer = lambda: as_varying(divided(self._fewer(x, words, counts, seed)), axes)
        same = lambda: as_varying((parts, words), axes)
        return lax.cond(jnp.max(counts) > self.room, fewer, same)

    def _fewer(self, x, words, counts, seed):
        """Of the elements of each region the largest, as many as there is room for."""
        # They are listed first: a region of the list is shorter than one of the array.
        ranks = lax.iota(jnp.int32, self.most)
        here, real = bits.listed(bits.rank_index(words, self.most), self.most)
        listed = jnp.where(real, x.at[here].get(mode="clip"), 0)
        listed = jnp.pad(listed, (0, self.most))
        first = jnp.cumsum(counts) - counts

        def one(region, kept):
            own = lax.dynamic_slice_in_dim(listed, first[region], self.most)
            own = jnp.where(ranks < counts[region], own, 0)
            flags = bits.unpack(magnitudes.largest(own, jnp.int32(self.room), seed))
            # What is written behind its end the next region writes over.
            flags = flags[: self.most]
            return lax.dynamic_update_slice_in_dim(kept, flags, first[region], 0)

        none = as_varying(jnp.zeros(listed.shape, bool), varying_axes(listed))
        kept = lax.fori_loop(0, self.ranks, one, none)[: self.most]
        bit = jnp.where(kept, jnp.uint32(1) << (here % bits.WORD).astype(jnp.uint32), 0)
        return jnp.zeros_like(words).at[here // bits.WORD].add(bit)


def rooms(size: int, ranks: int, k: int, slack: float) -> Regions:
    """Regions of an array of which k elements, and `slack` more at most, are chosen."""
    words = size // bits.WORD + 1
    widest = min(words, _WIDEST * -(-words // ranks))
    most = math.ceil((1 + slack) * k)
    return Regions(size, ranks, words, widest, k, most, -(-most // ranks))
