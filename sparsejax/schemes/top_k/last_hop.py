"""Ok-Topk's second phase: balance and allgatherv (section 3.1.2).

On the wire, each rank's selection from its region is gathered on all ranks, in messages as
long as the longest. If one rank has many times its share, these would be mostly padding.
Then each rank writes its entries into its own range of one list, with zeros elsewhere, and
the list is summed by an all-reduce of integers: its reduce-scatter does the work of the
paper's data balancing, and its all-gather that of the allgatherv.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import branches
from sparsejax.schemes import base
from sparsejax.schemes.top_k import base as top_k
from sparsejax.schemes.top_k.regions import Regions
from sparsejax.units import bits
from sparsejax.wire import channels
from sparsejax.wire.collectives import Wire
from sparsejax.wire.ladder import Ladder


@dataclasses.dataclass(frozen=True)
class LastHop:
    """Balance and allgatherv for arrays of one shape, with their static properties.

    Attributes:
        regions: The division of elements.
        sizes: The message sizes.
        balance_at: The multiple of the mean above which the largest count is balanced.
        wire: The ranks.
    """

    regions: Regions
    sizes: Ladder
    balance_at: float
    wire: Wire

    def gathered(
        self, region: jax.Array, words: jax.Array, counts: jax.Array, starts: jax.Array
    ) -> tuple[jax.Array, base.Stage]:
        """Gathers the selections from all regions (Algorithm 1, line 13).

        Args:
            region: The sum of this rank's region.
            words: The selection from it, packed.
            counts: int32 [ranks], the elements that each rank selected, equal on all ranks.
            starts: The starts of the regions, in words.

        Returns:
            The selected elements, [size], the same on all ranks, and the stage.
        """
        regions, wire = self.regions, self.wire
        need = wire.same_elsewhere(jnp.max(counts))
        mean = jnp.sum(counts).astype(jnp.float32) / regions.ranks
        fits = (need <= self.balance_at * mean) & (need <= self.sizes.top)
        fits = wire.same_elsewhere(fits.astype(jnp.int32)) > 0
        directly = lambda: self._directly(region, words, starts, need)
        balanced = lambda: self._balanced(region, words, counts, starts)
        total, stage = branches.cond(fits, directly, balanced)
        return wire.assume_same(total[: regions.size]), wire.assume_same(stage)

    def _zeros(self, dtype):
        # A method, because XLA would copy an array that is an operand of a branch.
        return jnp.zeros(self.regions.words * bits.WORD, dtype)

    def _directly(self, region, words, starts, need):
        """Gathers each rank's selection, in messages as long as the longest."""
        total, sent = top_k.send_and_add(
            self.sizes,
            channels.pull(self.wire),
            words[None],
            top_k.source_of(region[None]),
            starts * bits.WORD,
            self._zeros(region.dtype),
            need,
        )
        return total, base.stage_of(sent)

    def _balanced(self, region, words, counts, starts):
        """All-reduces one list, of which each rank has written its own range."""
        regions, me = self.regions, self.wire.rank
        lanes = lax.iota(jnp.int32, regions.most)
        places, _ = bits.listed(bits.rank_index(words, lanes=regions.most), regions.most)
        first = jnp.sum(jnp.where(jnp.arange(regions.ranks) < me, counts, 0))
        # An index of 0 marks a row that no rank has written.
        index = (starts[me] * bits.WORD + places + 1).astype(jnp.uint32)
        values = bits.words_of(region.at[places].get(mode="clip")[:, None])
        rows = jnp.concatenate([index[:, None], values], axis=1)
        run = bits.unique_places(first + lanes, lanes < counts[me], regions.most)
        listed = jnp.zeros_like(rows).at[run].set(rows, mode="drop", unique_indices=True)
        listed, sent = self.wire.psum(self.wire.per_rank(listed))
        values = bits.rows_of(listed[:, 1:], region.dtype, 1)[:, 0]
        index = listed[:, 0].astype(jnp.int32) - 1
        total = self._zeros(region.dtype)
        index = jnp.where(index >= 0, index, total.size)
        total = total.at[index].set(values, mode="drop")
        return total, base.stage(sent, sent, 2)
