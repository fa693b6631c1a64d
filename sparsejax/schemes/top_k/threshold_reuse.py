"""Ok-Topk's selections: thresholds that are reused from step to step (section 3.1.3).

Every `every` steps both thresholds are computed exactly: the local ones on each rank, the
global one by counting the elements of all regions above fifteen candidates, eight times
(`magnitudes.kth_by_digits`; the authors gather all sums on all ranks).

In between, a rank's threshold is the one that would have selected k elements in the last
step, estimated as a power of the count over k, times its trend: residuals grow for the
first hundred steps or so, and thresholds with them. If it selects `slack` more or fewer
than k elements it is computed exactly at once, which sends nothing. For the global
threshold, ranks count the elements above the last one and above thirty candidates around
it, and the one whose count is closest to k is taken; if no count is within `slack` of k, it
is computed exactly.

The authors move both thresholds by a fixed factor, and only if the count is below 2/3 k or
above 5/4 k (local) or 4/3 k (global): that is `power=None`. Error feedback piles up
elements right below a threshold, so one per cent less may select a third more.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from sparsejax import branches
from sparsejax.schemes.top_k.regions import Regions
from sparsejax.units import bits
from sparsejax.units.selection import magnitudes
from sparsejax.wire import collectives
from sparsejax.wire.collectives import Wire


# Candidates for the global threshold over the last one: close together around 1.
_STEPS = tuple(0.003 * (1.25**i - 1) / 0.25 for i in range(1, 16))
_AROUND = (1.0, *(math.exp(sign * step) for step in _STEPS for sign in (-1, 1)))
_FAR = 4.0  # A count further off k than by this factor moves a threshold no more.


@dataclasses.dataclass(frozen=True)
class ThresholdRule:
    """When thresholds are computed exactly, and how they move in between.

    Attributes:
        every: The number of steps after which they are computed exactly.
        slack: How far a count may be off k, as a share of k.
        power: The power of the count over k by which a threshold is multiplied; None is
            the authors' rule, by which a threshold that selects too few stays in use.
        step: By the authors' rule, the factor for a local threshold.
    """

    every: int
    slack: float
    power: float | None
    step: float

    def next_local(
        self,
        thresholds: jax.Array,
        counts: jax.Array,
        k: jax.Array,
        fitting: jax.Array,
        trends: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns which local thresholds would have selected k elements, and their trends.

        Args:
            thresholds: [ranks], those of this step.
            counts: int32 [ranks], how many elements they selected.
            k: How many they should have selected.
            fitting: [ranks], what this function returned in the last step.
            trends: [ranks], what this function returned in the last step.
        """
        if self.power is None:
            moved = _moved(thresholds, counts, k, self.step, 5 / 4)
            return moved, jnp.zeros_like(moved)
        share = counts.astype(thresholds.dtype) / k
        moved = thresholds * jnp.clip(share, 1 / _FAR, _FAR) ** self.power
        moved = _usable(moved, counts)
        both = (moved > 0) & (fitting > 0)
        change = jnp.log(jnp.where(both, moved, 1) / jnp.where(both, fitting, 1))
        trends = (trends + jnp.clip(change, -1, 1)) / 2
        return moved, jnp.where(both, trends, 0)

    def next_global(self, threshold: jax.Array, count: jax.Array, k: jax.Array):
        """Returns the global threshold around which the next step looks for its own."""
        if self.power is None:
            step = 1 + (self.step - 1) * 2 / 3
            return _moved(threshold, count, k, step, 4 / 3)
        return _usable(threshold, count)


@dataclasses.dataclass(frozen=True)
class ThresholdReuse:
    """The two selections of one step.

    Attributes:
        rule: When thresholds are computed exactly.
        regions: How elements are divided among ranks.
        wire: The ranks.
        step: int32: steps before this one.
        seed: Which of equal elements are selected.
        k: int32: the number of elements to select.
    """

    rule: ThresholdRule
    regions: Regions
    wire: Wire
    step: jax.Array
    seed: jax.Array
    k: jax.Array

    @property
    def _period_over(self):
        return self.step % self.rule.every == 0

    def _too_few(self, count, key):
        """Whether a threshold selects so few that it is to be computed exactly."""
        if self.rule.power is None:
            return jnp.bool_(False)
        # A threshold with key 1 selects all elements but zeros: there are no more.
        return (count < (1 - self.rule.slack) * self.k) & (key > 1)

    def local_top_k(
        self, x: jax.Array, threshold: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Selects the largest elements of this rank (Algorithm 1, lines 2-4).

        Args:
            x: The accumulated gradient.
            threshold: The estimate of the local threshold.

        Returns:
            The selection as packed bits, at most `regions.most` elements; how many
            elements are above the threshold; and the threshold.
        """

        def above(key):
            return *magnitudes.at_least(x, key), key

        exactly = lambda: above(magnitudes.threshold(x, self.k, self.seed))
        estimate = above(magnitudes.key_of(threshold, x.dtype))
        words, count, key = estimate
        wrong = self._period_over | self._too_few(count, key)
        if self.rule.power is not None:
            wrong = wrong | (count > self.regions.most)
        words, count, key = branches.cond(wrong, exactly, lambda: estimate)
        words = magnitudes.fit(x, words, count, self.regions.most, self.seed)
        return words, count, magnitudes.magnitude_of(key, x.dtype)

    def global_top_k(
        self, region: jax.Array, threshold: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Selects the largest elements of the sum (Algorithm 1, lines 9-12).

        Args:
            region: The sum of this rank's region.
            threshold: The global threshold of the last step.

        Returns:
            The selection from this region as packed bits; how many elements each rank
            selected; the threshold; and the bytes that one rank sent for it.
        """
        regions, wire, rule = self.regions, self.wire, self.rule
        sums = self._nonzeros(region)
        around = _AROUND if rule.power is not None else _AROUND[:1]
        candidates = threshold * jnp.array(around, region.dtype)
        candidates = jax.vmap(lambda t: magnitudes.key_of(t, region.dtype))(candidates)

        def counts_above(keys):
            above = magnitudes.keys(sums)[None] >= keys[:, None]
            return jnp.sum(above, axis=1, dtype=jnp.int32)

        by_rank, sent = wire.all_gather(counts_above(candidates))
        totals = jnp.sum(by_rank, axis=0)
        distance = jnp.abs(totals - self.k)
        best = jnp.argmin(jnp.where(totals > regions.most, regions.size, distance))
        counts, key = by_rank[:, best], candidates[best]
        too_many = totals[best] > regions.most
        wrong = self._period_over | too_many | self._too_few(totals[best], key)
        wrong = wire.same_elsewhere(wrong.astype(jnp.int32)) > 0

        def exactly():
            of_regions = magnitudes.Shards(add=lambda x: wire.psum(wire.per_rank(x))[0])
            key = magnitudes.kth_by_digits(sums, self.k, of_regions)
            key = jnp.maximum(key, 1)
            counts, _ = wire.all_gather(counts_above(key[None])[0])
            return counts, key

        counts, key = branches.cond(wrong, exactly, lambda: (counts, key))
        words = bits.pack_all(magnitudes.keys(region) >= key)[: regions.widest]
        words, counts = self._shared_out(region, words, wire.assume_same(counts))
        threshold = magnitudes.magnitude_of(wire.assume_same(key), region.dtype)
        sum_bytes = lambda size: collectives.all_reduce_bytes(size, regions.ranks)
        search = magnitudes.kth_by_digits_bytes(region.dtype, sum_bytes)
        search = search + sent / len(around)
        return words, counts, threshold, sent + jnp.where(wrong, search, 0.0)

    def _shared_out(self, region, words, counts):
        """Cuts a selection of too many equal elements to each rank's share of them."""
        regions = self.regions
        count = jnp.sum(counts)
        share = regions.most / jnp.maximum(count, 1).astype(jnp.float32)
        # Shares are whole elements that add up to all that fit, and begin with another
        # rank in each step: of few elements, each rank's share would be rounded to none.
        first = (self.seed % regions.ranks).astype(jnp.int32)
        ends = jnp.floor(jnp.cumsum(jnp.roll(counts, -first)) * share).astype(jnp.int32)
        fewer = jnp.diff(jnp.minimum(ends, regions.most), prepend=0)
        fewer = jnp.minimum(jnp.roll(fewer, first), counts)

        def cut():
            kept = magnitudes.largest(region, fewer[self.wire.rank], self.seed)
            return kept[: regions.widest], fewer

        words, counts = branches.cond(count > regions.most, cut, lambda: (words, counts))
        return words, self.wire.assume_same(counts)

    def _nonzeros(self, region):
        """Lists the non-zero sums of a region, at most as many as were sent, then zeros."""
        most = min(self.regions.ranks * self.regions.room, self.regions.width)
        words = bits.pack_all(bits.nonzero(region))
        places, real = bits.listed(bits.rank_index(words, lanes=most), most)
        return jnp.where(real, region.at[places].get(mode="clip"), 0)


def _moved(threshold, count, k, step, most):
    """Moves a threshold by the authors' rule: by `step`, if the count is far off k."""
    share = count.astype(jnp.float32) / k
    factor = jnp.where(share < 2 / 3, 1 / step, jnp.where(share > most, step, 1.0))
    return _usable(threshold * factor.astype(threshold.dtype), count)


def _usable(threshold, count):
    """Returns zero for a threshold that selects nothing, or is NaN or infinite.

    From zero on all elements are selected, and of them the largest that fit.
    """
    return jnp.where(jnp.isfinite(threshold) & (count > 0), threshold, 0)
