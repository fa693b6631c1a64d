"""Ok-Topk's regions: the ranges of elements that each rank sums (section 3.1.1).

A region has consecutive whole words of 32 elements, so that the packed bits of a selection
can be split by region. The bounds are moved so that regions have about equally many
selected elements. No region is wider than four times the mean, because its sum has a buffer
of fixed size. So at worst three quarters of the ranks have empty regions.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import branches
from sparsejax.axes import as_varying, varying_axes
from sparsejax.units import bits
from sparsejax.units.selection import magnitudes
from sparsejax.wire import ladder
from sparsejax.wire.collectives import Wire


_WIDEST = 4  # The width of the widest region over the mean width.


class Regions(NamedTuple):
    """The division of elements among ranks, and the capacities of messages.

    Attributes:
        size: The number of elements.
        ranks: The number of ranks.
        words: The number of words of 32 elements.
        widest: An upper bound of the words of a region.
        k: The number of elements to select.
        most: The largest number of elements that may be selected.
        room: The capacity of a message of split and reduce, in entries of one region.
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
        """An upper bound of the elements of a region."""
        return self.widest * bits.WORD

    def even(self) -> jax.Array:
        """Returns the starts of regions of equal width, int32 [ranks], in words."""
        mean = -(-self.words // self.ranks)
        return jnp.minimum(jnp.arange(self.ranks, dtype=jnp.int32) * mean, self.words)

    def allowed(self, starts: jax.Array) -> jax.Array:
        """Adjusts starts so that they ascend and no region is wider than `widest`."""
        rank = jnp.arange(self.ranks, dtype=jnp.int32)
        # Two means that are nearly equal may be out of order after rounding.
        starts = jnp.where(rank == 0, 0, jnp.clip(starts, 0, self.words))
        starts = lax.cummax(starts)
        starts = jnp.maximum(starts, self.words - (self.ranks - rank) * self.widest)
        # No start is more than `widest` after the previous one.
        return lax.cummin(starts - rank * self.widest) + rank * self.widest

    def split_ladder(self, dtype: jnp.dtype, code: str) -> ladder.Ladder:
        """Returns the message sizes of split and reduce."""
        least = self.k // (2 * self.ranks) + 1
        return ladder.exactly(self.width, dtype.itemsize, self.room, code, least)

    def gather_ladder(self, dtype: jnp.dtype, code: str, balance_at: float):
        """Returns the message sizes of the allgatherv of regions without balancing."""
        most = min(self.most, math.ceil(balance_at * self.most / self.ranks))
        least = self.k // (2 * self.ranks) + 1
        return ladder.exactly(self.width, dtype.itemsize, most, code, least)

    def repartitioned(self, words: jax.Array, wire: Wire) -> jax.Array:
        """Returns starts with which regions have about equally many selected elements.

        Each rank computes the starts that would divide its own selection equally; the
        result is the mean of all ranks' starts.

        Args:
            words: The selection of this rank, packed.
            wire: The ranks.
        """
        index = bits.rank_index(words, lanes=self.ranks)
        count = index.row_end[-1]
        rank = jnp.arange(self.ranks, dtype=jnp.int32)
        first = (rank.astype(jnp.float32) * count / self.ranks).astype(jnp.int32)
        here = bits.select(index, first, length=1)[:, 0] // bits.WORD
        starts = jnp.where(count > 0, here, self.even()).astype(jnp.float32)
        # A sum in int32 could overflow. psum gives the same float32 sum on all ranks.
        total, _ = wire.psum(wire.per_rank(starts))
        return self.allowed(jnp.round(total / self.ranks).astype(jnp.int32))

    def fitted(
        self, x: jax.Array, words: jax.Array, starts: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Divides a selection among the regions, and reduces it to what messages hold.

        Args:
            x: The array.
            words: The selection from it, packed.
            starts: The starts of the regions.
            seed: The seed of the choice among equal elements, where not all fit.

        Returns:
            The packed bits of each region [ranks, widest], and of the whole selection.
        """
        ends = jnp.concatenate([starts[1:], jnp.full(1, self.words, jnp.int32)])
        places = starts[:, None] + lax.iota(jnp.int32, self.widest)
        inside = places < ends[:, None]

        def divided(words):
            return jnp.where(inside, words.at[places].get(mode="clip"), 0), words

        parts, _ = divided(words)
        counts = jnp.sum(lax.population_count(parts), axis=1, dtype=jnp.int32)
        cut = lambda: divided(self._largest(x, words, counts, seed))
        return branches.cond(jnp.max(counts) > self.room, cut, lambda: (parts, words))

    def _largest(self, x, words, counts, seed):
        """Returns the largest selected elements of each region that fit its message."""
        # The selection is listed first: a region's part of the list is shorter than that of
        # the array.
        lanes = lax.iota(jnp.int32, self.most)
        places, real = bits.listed(bits.rank_index(words, lanes=self.most), self.most)
        listed = jnp.where(real, x.at[places].get(mode="clip"), 0)
        listed = jnp.pad(listed, (0, self.most))
        first = jnp.cumsum(counts) - counts

        def select_in(region, selected):
            elements = lax.dynamic_slice_in_dim(listed, first[region], self.most)
            elements = jnp.where(lanes < counts[region], elements, 0)
            flags = bits.unpack(magnitudes.largest(elements, jnp.int32(self.room), seed))
            # The flags past the end of this region are overwritten by the next region.
            flags = flags[: self.most]
            return lax.dynamic_update_slice_in_dim(selected, flags, first[region], 0)

        none = as_varying(jnp.zeros(listed.shape, bool), varying_axes(listed))
        selected = lax.fori_loop(0, self.ranks, select_in, none)[: self.most]
        bit = jnp.uint32(1) << (places % bits.WORD).astype(jnp.uint32)
        bit = jnp.where(selected, bit, 0)
        return jnp.zeros_like(words).at[places // bits.WORD].add(bit)


def divide(size: int, ranks: int, k: int, slack: float) -> Regions:
    """Divides `size` elements, of which k to (1 + slack) k are selected, among ranks."""
    words = size // bits.WORD + 1
    widest = min(words, _WIDEST * -(-words // ranks))
    most = math.ceil((1 + slack) * k)
    return Regions(size, ranks, words, widest, k, most, -(-most // ranks))
