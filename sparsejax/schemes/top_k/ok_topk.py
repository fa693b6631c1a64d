"""Ok-Topk: the largest elements of the sum, by thresholds that are used again.

On the wire, with n ranks, P = (n - 1)/n, and k elements to choose:

    count   all_gather of four numbers: what is above the threshold, what of it fits the
            messages, the fullest of these, the threshold
    split   all_to_all: of what is above its threshold, each rank sends every other that
            rank's region: 2 k P words
    count   all_gather of how many elements of each region's sum are above some others
    gather  those go to all, each rank's message as long as the longest. Where one rank has
            more than `balance_at` times its share, an all-reduce of one list into which
            each rank writes its run: what balances it and gathers it is one collective

So 6 k P words with the papers' format where regions are balanced, up to 6 (1 + slack) k P
where they are not, and less with index codes. (From twice the share on, the list sends
about as much as messages padded to the longest would; the paper waits for four times.)

Every `threshold_every` steps both thresholds are found exactly: the local ones alone, that
of the sum by counting what all regions have above fifteen numbers, eight times
(`magnitudes.by_digits`; the authors gather all sums on all ranks). In between a local one
is what would have fitted in the last step, by a power of how many were chosen over k, and
goes on the way that it has gone: what waits grows for the first hundred steps or so, and
thresholds with it. Where one lets through `slack` more or less than k it is found exactly
at once, which sends nothing. For the sum, the second count is of what is above the last
threshold and thirty others around it, and the one that fits best is taken; if none does, it
is found exactly. (The authors move both by a fixed factor, and only below 2/3 and above 5/4
or 4/3 of k: `power=None`. Error feedback piles up numbers right below a threshold, so a
hundredth less may let through a third more.)

Every `repartition_every` steps, and after one in which a twentieth did not fit, the
regions' bounds are moved to where ranks would put them, on average, for regions of as many
elements: an all-reduce of n.

Bounds lie between words of 32 elements. No region is wider than four times the mean, so
that a region's sum has a buffer of fixed size; at worst a quarter of the ranks get what is
empty, and the others a third more.

Messages have room for `slack` more than the mean. Where more is above a threshold the
largest go: nothing needs room for what thresholds that do not fit yet would let through.
What does not go, and what is not in the total, stays with the rank that had it.

Sums are taken in the order of the ranks and copied, so all ranks have the same bits.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import errors, wire
from sparsejax.axes import as_varying, assume_same, varying_axes
from sparsejax.schemes import base
from sparsejax.schemes.forecast import Forecast, agreeing, fullest_part, sent_bytes
from sparsejax.schemes.top_k import base as top_k, last_hop
from sparsejax.schemes.top_k.regions import Regions, rooms
from sparsejax.sparsifiers import base as sparsifiers
from sparsejax.units import bits, magnitudes
from sparsejax.wire import gathers, index_codes, messages


_EXCHANGES = ("all_to_all", "rotated")
# What is tried for the sum's threshold, in multiples of the last one: finely close to it.
_STEPS = tuple(0.003 * (1.25**i - 1) / 0.25 for i in range(1, 16))
_AROUND = (1.0, *(math.exp(sign * step) for step in _STEPS for sign in (-1, 1)))
_FITTING = 0.95  # of what is chosen; where less fits, regions are bounded anew
_FAR = 4.0  # times too many or too few: what is further off moves a threshold no more


class OkTopkState(NamedTuple):
    """State of `OkTopk`; all alike on all ranks.

    Attributes:
        step: int32: calls before this one.
        fitting: [ranks], the thresholds above which each rank had k in the last step.
        trends: [ranks], the logarithm of how they change from step to step.
        threshold: Above which the sum is chosen.
        starts: int32 [ranks], the word of 32 elements at which each rank's region starts.
        crowded: Whether many elements did not fit their regions' messages the last time.
    """

    step: jax.Array
    fitting: jax.Array
    trends: jax.Array
    threshold: jax.Array
    starts: jax.Array
    crowded: jax.Array

    @property
    def thresholds(self) -> jax.Array:
        """Above which each rank chooses in this step, where that fits."""
        return self.fitting * jnp.exp(self.trends)


@dataclasses.dataclass(frozen=True)
class OkTopk(top_k.Selecting):
    """Ok-Topk's sparse all-reduce; see `selecting.Selecting` for what it has in common.

    Attributes:
        threshold_every: Thresholds are found exactly at every so many steps.
        repartition_every: Regions are bounded anew at every so many steps.
        slack: How many more may be chosen, and fit a message, than the mean.
        balance_at: From how many times its share in the total a rank is relieved.
        power: To which power of how many were chosen over k thresholds are multiplied. None
            is the authors' rule, and then too few are left at that.
        step: With that rule, by how much local thresholds are moved; that of the sum by two
            thirds of it.
        split: "all_to_all", or "rotated" for permutations to one rank after another.
        bucket: With "rotated", how many messages are under way together.
    """

    threshold_every: int = 32
    repartition_every: int = 64
    slack: float = 0.25
    balance_at: float = 2.0
    power: float | None = 0.05
    step: float = 1.012
    split: str = "all_to_all"
    bucket: int = 4

    def __post_init__(self):
        super().__post_init__()
        index_codes.parse(self.code)
        base.check_choice("split", self.split, _EXCHANGES)
        for name in ("threshold_every", "repartition_every", "bucket"):
            errors.check_whole(name, getattr(self, name), 1)
        errors.check_positive("slack", self.slack, 0, 16)
        errors.check_positive("balance_at", self.balance_at, 0.999)
        errors.check_positive("step", self.step, 1)
        if self.power is not None:
            errors.check_positive("power", self.power, 0, 1)

    @property
    def needs_ranks(self):
        return True

    def layout(self, size: int, ranks: int) -> Regions:
        """Regions and rooms for an array on so many ranks."""
        return rooms(size, ranks, self.k(size), self.slack)

    def init(self, like, ranks):
        size = math.prod(like.shape)
        dtype = jnp.promote_types(like.dtype, jnp.float32)
        starts = self.layout(size, ranks).even() if size else jnp.zeros(ranks, jnp.int32)
        none = lambda *shape: jnp.zeros(shape, dtype)
        return OkTopkState(
            jnp.int32(0), none(ranks), none(ranks), none(), starts, jnp.bool_(False)
        )

    def __call__(self, x, state, axis_name, *, present=None):
        if x.size == 0:
            return base.nothing_to_send(x, state, axis_name)
        flat, n = x.reshape(-1), wire.ranks(axis_name)
        base.check_units(flat)
        layout = self.layout(flat.size, n)
        # It decides what the program does, on all shards of a second axis.
        step = wire.same_elsewhere(state.step, axis_name)
        seed = top_k.Counted(step).seed
        wanted = jnp.int32(layout.k)
        draw = sparsifiers.Draw(
            step, seed, wanted, wire.rank(axis_name), model_axis=axis_name
        )
        run = _Run(self, layout, axis_name, draw)
        words, count, threshold = run.choose(flat, state)
        starts, moving = run.bounds(words, state)
        parts, words = layout.fitted(flat, words, starts, seed)
        counts, sending, need, thresholds, agreed = run.agreed(parts, count, threshold)
        region, push = run.reduce(flat, parts, starts, need)
        chosen, held, level, counted = run.choose_of_sum(region, state)
        steps = layout.pull(flat.dtype, self.code, self.balance_at)
        total, pull = last_hop.gather(
            layout, steps, region, chosen, held, starts, self.balance_at, axis_name
        )
        sent = top_k.flags(words[None], flat.size)[0]
        kept = jnp.where(sent, 0, flat)
        residual = top_k.left_over(flat, kept, total)
        state = OkTopkState(
            step + 1,
            *self._moved(state, thresholds, counts, wanted),
            self._moved_of_sum(level, jnp.sum(held), wanted),
            starts,
            jnp.sum(sending) < _FITTING * jnp.sum(jnp.minimum(counts, layout.most)),
        )
        traffic = base.traffic(
            push,
            pull,
            scalars=agreed + counted + moving,
            dense=wire.all_reduce_cost(x.size, x.dtype, None, n),
            before=jnp.max(counts).astype(jnp.float32) / flat.size,
            after=jnp.sum(held).astype(jnp.float32) / flat.size,
        )
        total, residual = total.reshape(x.shape), residual.reshape(x.shape)
        return base.Reduced(total, residual, state, traffic)

    def _moved(self, state, thresholds, counts, wanted):
        """What is remembered of the local thresholds: which would have fitted; trends."""
        if self.power is None:
            moved = self._by_rule(thresholds, counts, wanted, self.step, 5 / 4)
            return moved, jnp.zeros_like(moved)
        share = counts.astype(thresholds.dtype) / wanted
        fitting = thresholds * jnp.clip(share, 1 / _FAR, _FAR) ** self.power
        fitting = _known(fitting, counts)
        both = (fitting > 0) & (state.fitting > 0)
        change = jnp.log(jnp.where(both, fitting, 1) / jnp.where(both, state.fitting, 1))
        trends = (state.trends + jnp.clip(change, -1, 1)) / 2
        return fitting, jnp.where(both, trends, 0)

    def _moved_of_sum(self, threshold, count, wanted):
        """That of the sum."""
        if self.power is None:
            step = 1 + (self.step - 1) * 2 / 3
            return self._by_rule(threshold, count, wanted, step, 4 / 3)
        return _known(threshold, count)

    def _by_rule(self, threshold, count, wanted, step, most):
        """What the authors do."""
        share = count.astype(jnp.float32) / wanted
        factor = jnp.where(share < 2 / 3, 1 / step, jnp.where(share > most, step, 1.0))
        return _known(threshold * factor.astype(threshold.dtype), count)

    def forecast(self, load):
        n = load.ranks
        layout = self.layout(load.size, n)
        dtype = jnp.promote_types(load.dtype, jnp.float32)
        need = min(layout.room, fullest_part(layout.k, n, layout.width, True, 1.0, n))
        push, turns, room = sent_bytes(layout.split(dtype, self.code), need, n - 1)
        if self.split == "rotated":
            turns *= gathers.rotated_waits(n, self.bucket)
        need = fullest_part(layout.k, n, layout.width, True, 1.0)
        steps = layout.pull(dtype, self.code, self.balance_at)
        pull, more, _ = sent_bytes(steps, need, n - 1)
        return Forecast(push, pull, turns + more + 2 * agreeing(n), room)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One call."""

    scheme: OkTopk
    layout: Regions
    axis_name: wire.AxisName
    draw: sparsifiers.Draw

    @property
    def due(self):
        """Whether thresholds are found exactly in this step."""
        return self.draw.step % self.scheme.threshold_every == 0

    def few(self, count, level):
        """Whether a threshold lets through so few that it is to be found exactly."""
        if self.scheme.power is None:
            return jnp.bool_(False)
        # Below the least magnitude there is nothing to find.
        return (count < (1 - self.scheme.slack) * self.draw.wanted) & (level > 1)

    def choose(self, x, state):
        """What goes of x as packed bits, how many were above the threshold, and it."""
        wanted, seed, scheme = self.draw.wanted, self.draw.seed, self.scheme

        def above(level):
            words = bits.pack_all(magnitudes.keys(x) >= level)
            return words, bits.members(words), level

        def exactly():
            return above(jnp.maximum(magnitudes.kth_largest(x, wanted, seed), 1))

        known = above(magnitudes.key_of(state.thresholds[self.draw.rank], x.dtype))
        words, count, level = known
        wrong = self.due | self.few(count, level)
        if scheme.power is not None:
            wrong = wrong | (count > self.layout.most)
        axes = varying_axes(words) | varying_axes(x)
        typed = lambda side: lambda: as_varying(side(), axes)
        words, count, level = lax.cond(wrong, typed(exactly), typed(lambda: known))
        words = sparsifiers.fitted(x, words, count, self.draw, self.layout.most)
        return words, count, magnitudes.magnitude_of(level, x.dtype)

    def bounds(self, words, state):
        """The starts of the regions, moved if it is time to, and bytes."""
        moved = lambda: self.layout.wanted(words, self.axis_name)
        axes = varying_axes(jax.eval_shape(moved)) | varying_axes(state.starts)
        typed = lambda side: lambda: as_varying(side(), axes)
        due = self.draw.step % self.scheme.repartition_every == 0
        crowded = wire.same_elsewhere(state.crowded.astype(jnp.int32), self.axis_name)
        due = due | (crowded > 0)
        starts = lax.cond(due, typed(moved), typed(lambda: state.starts))
        sent = wire.all_reduce_bytes(4 * self.layout.ranks, self.layout.ranks)
        return starts, jnp.where(due, sent, 0.0)

    def agreed(self, parts, count, threshold):
        """All ranks' counts, what they send, the fullest message, thresholds, and bytes."""
        each = jnp.sum(lax.population_count(parts), axis=1, dtype=jnp.int32)
        numbers = jnp.stack([count, jnp.sum(each), jnp.max(each)])
        message = [bits.as_words(threshold), bits.as_words(numbers)[:, 0]]
        told, sent = wire.all_gather(jnp.concatenate(message), self.axis_name)
        thresholds = bits.of_words(told[:, : len(message[0])], threshold.dtype)
        counts = bits.of_words(told[:, len(message[0]) :, None], jnp.int32)
        need = wire.same_elsewhere(jnp.max(counts[:, 2]), self.axis_name)
        return counts[:, 0], counts[:, 1], need, thresholds, sent

    def reduce(self, x, parts, starts, need):
        """The sum of what ranks chose of this rank's region: [width], and what was sent."""
        layout = self.layout
        at = starts[:, None] * bits.WORD
        source = messages.Source(x, units=lambda slots: at + slots)
        channel = (
            wire.push_channel(self.axis_name)
            if self.scheme.split == "all_to_all"
            else gathers.rotated_channel(self.axis_name, self.scheme.bucket)
        )
        steps = layout.split(x.dtype, self.scheme.code)
        zeros = jnp.zeros(layout.width, x.dtype)
        none = jnp.zeros(layout.ranks, jnp.int32)
        region, sent = top_k.deliver(steps, channel, parts, source, none, zeros, need)
        mean = jnp.maximum(jnp.float32(layout.k) / layout.ranks, 1)
        return region, base.stage_of(sent, jnp.maximum(need / mean, 1))

    def choose_of_sum(self, region, state):
        """What of the sum is in the total: packed, by rank, the threshold, and bytes."""
        layout, axis_name, draw = self.layout, self.axis_name, self.draw
        sums = self._sums(region)
        around = _AROUND if self.scheme.power is not None else _AROUND[:1]
        tried = state.threshold * jnp.array(around, region.dtype)
        tried = jax.vmap(lambda t: magnitudes.key_of(t, region.dtype))(tried)
        above = lambda levels: jnp.sum(
            magnitudes.keys(sums)[None] >= levels[:, None], axis=1, dtype=jnp.int32
        )
        by_rank, told = wire.all_gather(above(tried), axis_name)
        totals = jnp.sum(by_rank, axis=0)
        off = jnp.abs(totals - draw.wanted)
        best = jnp.argmin(jnp.where(totals > layout.most, layout.size, off))
        counts, level = by_rank[:, best], tried[best]
        wrong = self.due | (totals[best] > layout.most) | self.few(totals[best], level)
        wrong = wire.same_elsewhere(wrong.astype(jnp.int32), axis_name) > 0
        axes = varying_axes(sums) | varying_axes(counts) | varying_axes(level)

        def exactly():
            level = magnitudes.by_digits(sums, draw.wanted, draw.total)
            level = jnp.maximum(level, 1)
            counts, _ = wire.all_gather(above(level[None])[0], axis_name)
            return as_varying((counts, level), axes)

        counts, level = lax.cond(wrong, exactly, lambda: as_varying((counts, level), axes))
        words = bits.pack_all(magnitudes.keys(region) >= level)[: layout.widest]
        words, counts = self._shared(region, words, assume_same(counts, axis_name))
        level = magnitudes.magnitude_of(assume_same(level, axis_name), region.dtype)
        one = lambda size: wire.all_reduce_bytes(size, layout.ranks)
        search = magnitudes.by_digits_bytes(region.dtype, one) + told / len(around)
        return words, counts, level, told + jnp.where(wrong, search, 0.0)

    def _shared(self, region, words, counts):
        """Of too many equal ones each rank gives as many as is its share."""
        layout, axis_name = self.layout, self.axis_name
        count = jnp.sum(counts)
        share = layout.most / jnp.maximum(count, 1).astype(jnp.float32)
        # Shares of whole elements that add up to all there are, beginning with another
        # rank in each step: of few, each rank's own would be rounded to nothing.
        first = (self.draw.seed % layout.ranks).astype(jnp.int32)
        ends = jnp.floor(jnp.cumsum(jnp.roll(counts, -first)) * share).astype(jnp.int32)
        fewer = jnp.diff(jnp.minimum(ends, layout.most), prepend=0)
        fewer = jnp.minimum(jnp.roll(fewer, first), counts)
        axes = varying_axes(words) | varying_axes(counts)

        def cut():
            mine = fewer[self.draw.rank]  # as all ranks have reckoned it
            kept = magnitudes.largest(region, mine, self.draw.seed)[: layout.widest]
            return as_varying((kept, fewer), axes)

        same = lambda: as_varying((words, counts), axes)
        words, counts = lax.cond(count > layout.most, cut, same)
        return words, assume_same(counts, axis_name)

    def _sums(self, region):
        """The sums of a region that are not zero, and zeros: at most so many were sent."""
        most = min(self.layout.ranks * self.layout.room, self.layout.width)
        words = bits.pack_all(bits.nonzero(region))
        here, real = bits.listed(bits.rank_index(words, most), most)
        return jnp.where(real, region.at[here].get(mode="clip"), 0)


def _known(threshold, count):
    """Zero for a threshold that lets nothing through, or was found among NaN or infinity.

    From zero on all goes, that is, the largest of which there is room.
    """
    return jnp.where(jnp.isfinite(threshold) & (count > 0), threshold, 0)
