"""Ok-Topk: the largest elements of the sum of the ranks' largest elements.

Algorithm 1 of the paper. On the wire, with n ranks, P = (n - 1)/n, and k elements to
select, in each step:

    counts              all_gather of four numbers: the number of elements above a rank's
                        threshold, the number of these that fit the messages, the entries
                        of the fullest message, and the threshold
    split and reduce    all_to_all: each rank sends every other rank its selection from that
                        rank's region: 2 k P words
    counts              all_gather of the numbers of elements of each region's sum that are
                        above the global threshold, and above some other candidates
    balance and         all_gather of the selected sums, in messages as long as the longest.
    allgatherv          If one rank has more than `balance_at` times the mean, an all-reduce
                        of one list instead (`last_hop`)

That is 6 k P words in the papers' format where regions are balanced, up to
6 (1 + slack) k P where they are not, and less with index codes. (From twice the mean on,
the list sends about as much as messages padded to the longest would; the paper balances
from four times on.)

Thresholds are computed exactly every `threshold_every` steps and reused in between
(`threshold_reuse`). Every `repartition_every` steps, and after a step in which a twentieth
of the selected elements did not fit, the bounds of the regions are moved, by an all-reduce
of n numbers (`regions`).

The capacity of messages exceeds the mean by `slack`. If more elements are above a
threshold, only the largest are sent, so no buffer needs room for the selection of a wrong
threshold. What is selected but not in the total stays in the residual of the rank that had
it.

Sums are taken in the order of the ranks and copied, so all ranks end with the same bits.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import arguments, branches
from sparsejax.errors import StateError
from sparsejax.schemes import base
from sparsejax.schemes.forecast import Forecast, agreeing, expected_fullest
from sparsejax.schemes.top_k import base as top_k
from sparsejax.schemes.top_k.last_hop import LastHop
from sparsejax.schemes.top_k.regions import Regions, divide
from sparsejax.schemes.top_k.threshold_reuse import ThresholdReuse, ThresholdRule
from sparsejax.units import bits
from sparsejax.units.units import wide
from sparsejax.wire import channels, collectives, gathers, index_codes, messages


_EXCHANGES = ("all_to_all", "rotated")
_FITTING = 0.95  # If a smaller share of selected elements fits, regions are repartitioned.


class OkTopkState(NamedTuple):
    """State of `OkTopk`, the same on all ranks.

    Attributes:
        step: int32 [], the number of earlier calls.
        fitting: [ranks], estimates of the thresholds with which each rank would have
            selected k elements in the last step.
        trends: [ranks], the mean logarithm of their change from step to step.
        threshold: The global threshold.
        starts: int32 [ranks], the word of 32 elements at which each rank's region starts.
        crowded: Whether many elements did not fit their region's message in the last step.
    """

    step: jax.Array
    fitting: jax.Array
    trends: jax.Array
    threshold: jax.Array
    starts: jax.Array
    crowded: jax.Array

    @property
    def thresholds(self) -> jax.Array:
        """The estimates of the ranks' local thresholds for this step."""
        return self.fitting * jnp.exp(self.trends)


class SelectionCounts(NamedTuple):
    """Counts of selected elements that all ranks know of each other.

    Attributes:
        above: int32 [ranks], the number of elements above each rank's threshold.
        sent: int32 [ranks], the number of these that fit the messages.
        fullest: int32 [], the entries of the fullest of all messages.
        thresholds: [ranks], the local thresholds.
        bytes: The bytes that one rank sent for these counts.
    """

    above: jax.Array
    sent: jax.Array
    fullest: jax.Array
    thresholds: jax.Array
    bytes: float


@dataclasses.dataclass(frozen=True)
class OkTopk(top_k.TopKScheme):
    """Sums the largest elements by regions, each of which one rank owns, as Ok-Topk does.

    Each rank selects about k elements, and sends them to the owners of their regions. An
    owner sums its region, selects the elements above a global threshold, and sends them to
    all. Thresholds are reused from step to step.

    Attributes:
        density: The share of elements that are not zero in the sum; smaller sends less.
        code: How indices are sent: "coo32" (the paper's), "coo16", "coo8", "bitmap", or
            "auto" for the cheapest.
        threshold_every: The number of steps after which thresholds are computed exactly.
        repartition_every: The number of steps after which the bounds of regions are
            computed again.
        slack: By which share a selection may exceed k elements, and a message the mean.
        balance_at: A rank's selection is balanced if it has this many times the mean.
        power: Thresholds are multiplied by (count / k)^power. None is the rule of the
            authors' code.
        step: By the rule of the authors' code: the factor by which local thresholds are
            changed. The global one is changed by two thirds of it.
        split: How selections are sent to owners: "all_to_all"; or "rotated", to one rank
            after another (the paper's destination rotation). "rotated" compiles an
            operation for each rank.
        bucket: With "rotated": the number of messages that are sent concurrently (the
            paper's bucketing).

    Example:
        >>> tx = sparsejax.sync(sparsejax.schemes.OkTopk(density=0.01, threshold_every=64))
        >>> opt_state = sparsejax.init(tx, params, mesh)

    References:
        Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP
        2022
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
        arguments.check_one_of("split", self.split, _EXCHANGES)
        for name in ("threshold_every", "repartition_every", "bucket"):
            arguments.check_whole(name, getattr(self, name), 1)
        arguments.check_positive("slack", self.slack, 0, 16)
        arguments.check_positive("balance_at", self.balance_at, 0.999)
        arguments.check_positive("step", self.step, 1)
        if self.power is not None:
            arguments.check_positive("power", self.power, 0, 1)

    def regions(self, size: int, ranks: int) -> Regions:
        """Divides an array among the ranks.

        Args:
            size: The number of elements of the array.
            ranks: The number of ranks.
        """
        return divide(size, ranks, self.k(size), self.slack)

    def init(self, like, wire):
        size, ranks = math.prod(like.shape), base.known_ranks(self, wire).ranks
        dtype = wide(like.dtype)
        starts = self.regions(size, ranks).even() if size else jnp.zeros(ranks, jnp.int32)
        zeros = lambda *shape: jnp.zeros(shape, dtype)
        return OkTopkState(
            jnp.int32(0), zeros(ranks), zeros(ranks), zeros(), starts, jnp.bool_(False)
        )

    def __call__(self, x, state, wire):
        base.check_state(self, state, OkTopkState)
        if len(state.starts) != wire.ranks:
            raise StateError(
                f"the state of OkTopk was made for {len(state.starts)} ranks, and there "
                f"are {wire.ranks}: its thresholds and regions are by rank. Make it with "
                "sparsejax.init(tx, params, mesh), or use sparsejax.resized."
            )
        if x.size == 0:
            return base.nothing_to_send(x, state, wire)
        accumulated = x.dense().reshape(-1)
        base.check_units(accumulated)
        regions = self.regions(accumulated.size, wire.ranks)
        # Branches depend on the step, so it must be equal over a second axis, too.
        step = wire.same_elsewhere(state.step)
        seed, k = top_k.seed_of(step), jnp.int32(regions.k)
        rule = ThresholdRule(self.threshold_every, self.slack, self.power, self.step)
        reuse = ThresholdReuse(rule, regions, wire, step, seed, k)
        words, above, threshold = reuse.local_top_k(
            accumulated, state.thresholds[wire.rank]
        )
        starts, moving = self._repartition(regions, words, step, state, wire)
        parts, words = regions.fitted(accumulated, words, starts, seed)
        counts = _exchange_counts(parts, above, threshold, wire)
        region, push = self._split_and_reduce(
            regions, accumulated, parts, starts, counts.fullest, wire
        )
        chosen, by_rank, threshold, counting = reuse.global_top_k(region, state.threshold)
        sizes = regions.gather_ladder(accumulated.dtype, self.code, self.balance_at)
        last_hop = LastHop(regions, sizes, self.balance_at, wire)
        total, pull = last_hop.gathered(region, chosen, by_rank, starts)
        sent = top_k.unpacked(words[None], accumulated.size)[0]
        left = top_k.residual(accumulated, jnp.where(sent, 0, accumulated), total)
        # In float32, since int32 could overflow with many ranks.
        selected = jnp.sum(jnp.minimum(counts.above, regions.most), dtype=jnp.float32)
        fitting = jnp.sum(counts.sent, dtype=jnp.float32)
        state = OkTopkState(
            step + 1,
            *rule.next_local(
                counts.thresholds, counts.above, k, state.fitting, state.trends
            ),
            rule.next_global(threshold, jnp.sum(by_rank), k),
            starts,
            fitting < jnp.float32(_FITTING) * selected,
        )
        traffic = base.traffic(
            push,
            pull,
            scalars=counts.bytes + counting + moving,
            dense=wire.dense_bytes(x.size, x.dtype),
            before=jnp.max(counts.above).astype(jnp.float32) / accumulated.size,
            after=jnp.sum(by_rank).astype(jnp.float32) / accumulated.size,
        )
        return base.Reduced(total.reshape(x.shape), left.reshape(x.shape), state, traffic)

    def _repartition(self, regions, words, step, state, wire):
        """Moves the regions' bounds if it is time to (Algorithm 1, lines 5-7).

        Returns:
            The starts of the regions, and the bytes that one rank sent.
        """
        moved = lambda: regions.repartitioned(words, wire)
        crowded = wire.same_elsewhere(state.crowded.astype(jnp.int32))
        time_to = (step % self.repartition_every == 0) | (crowded > 0)
        starts = branches.cond(time_to, moved, lambda: state.starts)
        sent = collectives.all_reduce_bytes(4 * regions.ranks, regions.ranks)
        return starts, jnp.where(time_to, sent, 0.0)

    def _split_and_reduce(self, regions, x, parts, starts, need, wire):
        """Sums this rank's region (Algorithm 1, line 8).

        Args:
            regions: The division of elements.
            x: The accumulated gradient.
            parts: The selection from each region, packed.
            starts: The starts of the regions, in words.
            need: int32 [], the entries of the fullest message.
            wire: The ranks.

        Returns:
            The sum of all ranks' selections from this region, [width], and the stage.
        """
        first = starts * bits.WORD
        unit = lambda part, slots: first.at[part].get(mode="promise_in_bounds") + slots
        channel = (
            channels.push(wire)
            if self.split == "all_to_all"
            else gathers.rotated_channel(wire, self.bucket)
        )
        region, sent = top_k.send_and_add(
            regions.split_ladder(x.dtype, self.code),
            channel,
            parts,
            messages.Source(x, units=unit),
            jnp.zeros(regions.ranks, jnp.int32),
            jnp.zeros(regions.width, x.dtype),
            need,
        )
        mean = jnp.maximum(jnp.float32(regions.k) / regions.ranks, 1)
        return region, base.stage_of(sent, jnp.maximum(need / mean, 1))

    def forecast(self, load):
        """Forecasts k evenly spread elements; in a run thresholds decide how many."""
        n = load.ranks
        regions = self.regions(load.size, n)
        dtype = wide(load.dtype)
        fullest = expected_fullest(regions.k, n, regions.width, sets=n)
        sizes = regions.split_ladder(dtype, self.code)
        route = channels.Route(n - 1)
        push, turns, room = sizes.sent(min(regions.room, fullest), route)
        # A round of an all-to-all or of a gather is n - 1 messages, as in the paper.
        latencies = turns * (n - 1)
        if self.split == "rotated":
            turns *= gathers.rotated_route(n, self.bucket).waits
            latencies = turns
        fullest = expected_fullest(regions.k, n, regions.width)
        sizes = regions.gather_ladder(dtype, self.code, self.balance_at)
        pull, more, _ = sizes.sent(fullest, route)
        latencies += more * (n - 1) + 2 * agreeing(n)
        return Forecast(push, pull, latencies, room, rounds=turns + more)


def _exchange_counts(parts, above, threshold, wire):
    """Gathers the counts and thresholds of all ranks.

    Args:
        parts: The selection from each region, packed.
        above: int32 [], the number of elements above this rank's threshold.
        threshold: This rank's threshold.
        wire: The ranks.
    """
    each = jnp.sum(lax.population_count(parts), axis=1, dtype=jnp.int32)
    numbers = jnp.stack([above, jnp.sum(each), jnp.max(each)])
    threshold_words = bits.words_of(threshold[..., None])
    message = [threshold_words, bits.words_of(numbers)]
    gathered, sent = wire.all_gather(jnp.concatenate(message))
    cut = len(threshold_words)
    thresholds = bits.rows_of(gathered[:, :cut], threshold.dtype, 1)[:, 0]
    numbers = bits.rows_of(gathered[:, cut:], numbers.dtype, numbers.size)
    fullest = wire.same_elsewhere(jnp.max(numbers[:, 2]))
    return SelectionCounts(numbers[:, 0], numbers[:, 1], fullest, thresholds, sent)
