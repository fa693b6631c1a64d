"""Ok-Topk's regions: which rank sums which elements (section 3.1.1).

A region is a run of whole words of 32 elements, so that the packed bits of a selection
split into those of the regions. The bounds are moved so that about as many selected
elements are in each. No region is wider than four times the mean, because its sum has a
buffer of fixed size. At worst a quarter of the ranks have empty regions.
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
    """How elements are divided among ranks, and how many of them fit.

    Attributes:
        size: The number of elements.
        ranks: The number of ranks.
        words: Words of 32 elements.
        widest: Words of the widest region.
        k: The number of elements to select.
        most: The largest number of elements that may be selected.
        room: Entries of one region that fit a message of split and reduce.
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
        """Returns the starts of regions of one width."""
        mean = -(-self.words // self.ranks)
        return jnp.minimum(jnp.arange(self.ranks, dtype=jnp.int32) * mean, self.words)

    def allowed(self, starts: jax.Array) -> jax.Array:
        """Returns starts close to these with which no region is wider than the widest."""
        rank = jnp.arange(self.ranks, dtype=jnp.int32)
        # Two means that are nearly the same need not be in order once they are rounded.
        starts = jnp.where(rank == 0, 0, jnp.clip(starts, 0, self.words))
        starts = lax.cummax(starts)
        starts = jnp.maximum(starts, self.words - (self.ranks - rank) * self.widest)
        # No start is more than the widest region after the one before it.
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
        """Returns starts with which the regions have about as many selected elements.

        Each rank computes the starts that would fit its own selection; the mean of all
        ranks' starts is taken.

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
        # A sum of integers might overflow. All ranks have the same sum of floats.
        total, _ = wire.psum(wire.per_rank(starts))
        return self.allowed(jnp.round(total / self.ranks).astype(jnp.int32))

    def fitted(
        self, x: jax.Array, words: jax.Array, starts: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Divides a selection among the regions, and cuts it to what fits the messages.

        Args:
            x: The array.
            words: The selection from it, packed.
            starts: Of the regions.
            seed: Which of equal elements are selected, where not all fit.

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
        # They are listed first: a region of the list is shorter than one of the array.
        lanes = lax.iota(jnp.int32, self.most)
        places, real = bits.listed(bits.rank_index(words, lanes=self.most), self.most)
        listed = jnp.where(real, x.at[places].get(mode="clip"), 0)
        listed = jnp.pad(listed, (0, self.most))
        first = jnp.cumsum(counts) - counts

        def select_in(region, selected):
            elements = lax.dynamic_slice_in_dim(listed, first[region], self.most)
            elements = jnp.where(lanes < counts[region], elements, 0)
            flags = bits.unpack(magnitudes.largest(elements, jnp.int32(self.room), seed))
            # The next region overwrites what is written past the end of this one.
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
