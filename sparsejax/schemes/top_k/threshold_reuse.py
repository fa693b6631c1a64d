"""Ok-Topk's selections: thresholds that are reused from step to step (section 3.1.3).

Every `every` steps both thresholds are computed exactly: the local ones on each rank, the
global one by counting the elements of all regions above fifteen candidates, eight times
(`magnitudes.kth_by_digits`; the authors gather all sums on all ranks).

In between, a rank's threshold is an estimate of the one that would have selected k elements
in the last step, from a power of the count over k, times a trend: residuals grow for about
the first hundred steps, and thresholds with them. If it selects `slack` more or fewer than
k elements it is computed exactly at once, which sends nothing. For the global threshold,
ranks count the elements above the last threshold and above thirty candidates around it, and
take the one whose count is closest to k; if no count is within `slack` of k, the threshold
is computed exactly.

The authors change both thresholds by a fixed factor, and only if the count is below 2/3 k
or above 5/4 k (local) or 4/3 k (global): that is `power=None`. Error feedback accumulates
elements just below a threshold, so a threshold of one per cent less may select a third
more.
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


# The candidates for the global threshold, divided by the last one; they are densest at 1.
_STEPS = tuple(0.003 * (1.25**i - 1) / 0.25 for i in range(1, 16))
_AROUND = (1.0, *(math.exp(sign * step) for step in _STEPS for sign in (-1, 1)))
_FAR = 4.0  # The bound of the ratio of count and k by which a threshold is changed.


@dataclasses.dataclass(frozen=True)
class ThresholdRule:
    """The steps in which thresholds are computed exactly, and their changes in others.

    Attributes:
        every: The number of steps after which thresholds are computed exactly.
        slack: The allowed difference of a count from k, as a share of k.
        power: The power of the count over k by which a threshold is multiplied; None is
            the authors' rule, which keeps a threshold in use that selects too few.
        step: The factor of a local threshold by the authors' rule.
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
        """Estimates the local thresholds that would have selected k, and their trends.

        Args:
            thresholds: [ranks], the thresholds of this step.
            counts: int32 [ranks], the number of elements that they selected.
            k: int32 [], the number of elements that they should select.
            fitting: [ranks], the estimates of the last step, as returned here.
            trends: [ranks], the trends of the last step, as returned here.
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
        """Returns the global threshold around which the next step has its candidates."""
        if self.power is None:
            step = 1 + (self.step - 1) * 2 / 3
            return _moved(threshold, count, k, step, 4 / 3)
        return _usable(threshold, count)


@dataclasses.dataclass(frozen=True)
class ThresholdReuse:
    """The two selections of one step.

    Attributes:
        rule: The rule by which thresholds are computed or changed.
        regions: The division of elements among ranks.
        wire: The ranks.
        step: int32 [], the number of earlier steps.
        seed: The seed of the choice among equal elements.
        k: int32 [], the number of elements to select.
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
        """Returns whether a threshold selects so few that it must be computed exactly."""
        if self.rule.power is None:
            return jnp.bool_(False)
        # A threshold with key 1 selects all non-zero elements, so there are no more.
        return (count < (1 - self.rule.slack) * self.k) & (key > 1)

    def local_top_k(
        self, x: jax.Array, threshold: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Selects the largest elements of this rank (Algorithm 1, lines 2-4).

        Args:
            x: The accumulated gradient.
            threshold: The estimate of the local threshold.

        Returns:
            The selection as packed bits, at most `regions.most` elements; the number of
            elements above the threshold; and the threshold.
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
            The selection from this region as packed bits; the number of elements that each
            rank selected; the threshold; and the bytes that one rank sent for it.
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
        """Reduces a selection of too many equal elements to each rank's share of them."""
        regions = self.regions
        count = jnp.sum(counts)
        share = regions.most / jnp.maximum(count, 1).astype(jnp.float32)
        # Shares are whole numbers that add up to `most`: rounded one by one, shares of few
        # elements would all be zero. The first rank differs from step to step, so that
        # rounding does not always favour the same ranks.
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
        """Lists the non-zero sums of a region, padded with zeros to all entries sent."""
        most = min(self.regions.ranks * self.regions.room, self.regions.width)
        words = bits.pack_all(bits.nonzero(region))
        places, real = bits.listed(bits.rank_index(words, lanes=most), most)
        return jnp.where(real, region.at[places].get(mode="clip"), 0)


def _moved(threshold, count, k, step, most):
    """Changes a threshold by the authors' rule: by `step`, if the count is far from k."""
    share = count.astype(jnp.float32) / k
    factor = jnp.where(share < 2 / 3, 1 / step, jnp.where(share > most, step, 1.0))
    return _usable(threshold * factor.astype(threshold.dtype), count)


def _usable(threshold, count):
    """Replaces a threshold that selects nothing, or is NaN or infinite, by zero.

    A threshold of zero selects all non-zero elements, of which the largest are then sent.
    """
    return jnp.where(jnp.isfinite(threshold) & (count > 0), threshold, 0)
