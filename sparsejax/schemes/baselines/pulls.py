"""Two more pulls, by which the sums of owners return to all ranks; see `owners.pulls`.

On the wire, with n ranks:

    Spread              all_to_all of the sums to evenly filled parts, then all_gather
    RecursiveDoubling   log2 n messages; each doubles the sums that a rank holds

`Spread` is a broadcast by all owners at once, as a scatter and an all-gather: an owner
sends a share of its sums to each rank, and each rank sends its shares to all. An owner that
has nearly all sums then sends little more than the others. With a hash parts are already
even, and `Gather` does the same in one message.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from sparsejax.schemes import base, doubling
from sparsejax.schemes.forecast import agreeing, expected_fullest
from sparsejax.schemes.owners.plan import OwnerPlan
from sparsejax.schemes.owners.pulls import PullEntries, nonzero_units
from sparsejax.units import bits
from sparsejax.units.bits import Slots
from sparsejax.units.ownership import Layout, StripedHash
from sparsejax.wire import channels, collectives, ladder, messages


# The seed differs from the default of `StripedHash`, which may already divide the parts.
_SHARES = StripedHash(seed=0x1B56C4E9)


@dataclasses.dataclass(frozen=True)
class Spread(PullEntries):
    """Scatters even shares of each owner's sums, and gathers the shares of all ranks."""

    def by_entries(self, owned, totals, sets, fullest):
        n, wire = owned.layout.ranks, owned.wire
        spread, plan = _Shares.of(owned.layout), _SpreadPlan.of(owned.plan)
        inner = spread.shares
        shared = dataclasses.replace(owned, layout=spread, plan=plan.gathered)
        shares = Slots.of(inner.split(bits.nonzero_units(totals)))
        fullest_share, agreed = wire.maximum(jnp.max(shares.counts))
        count, counted = wire.psum(sets.counts[0])
        count = wire.same_elsewhere(count)

        def place(held, owner, slots, values):
            at = jnp.where(slots < inner.width, owner * inner.width + slots, spread.width)
            return held.at[at].set(values, mode="drop")

        def send(totals):
            held, sent = messages.transmit(
                plan.scattered,
                channels.push(wire),
                shares,
                messages.Source(totals, units=inner.units_of),
                fullest_share,
                messages.Fold(
                    jnp.zeros((spread.width, *totals.shape[1:]), owned.dtype), place
                ),
                typical=count.astype(jnp.float32)[None] / n**2,
            )
            kept = Slots.of(bits.of_units(held)[None])
            most, cost = wire.maximum(kept.counts[0])
            total, stage, units = shared.gather(held, kept, most)
            first = base.stage_of(sent._replace(wire=sent.wire + cost))
            return total, base.add_stages(first, stage), units

        return send, plan.entry_bytes(fullest_share, count), agreed + counted

    def of_entries(self, plan, load, fullest):
        n, last = load.ranks, math.ceil(load.counts[-1])
        spread = _SpreadPlan.of(plan)
        even = expected_fullest(last, n, spread.gathered.width)
        share = expected_fullest(fullest, n, spread.scattered.width, sets=n)
        share, held = load.fullest[2:] if load.fullest else (share, even)
        scattered, turns, _ = spread.scattered.sent(share, plan.route)
        gathered, more, _ = spread.gathered.pull.sent(held, plan.route)
        turns += more
        # The agreement between both stages is counted with the entries.
        sent = scattered + gathered + collectives.all_reduce_bytes(4, n)
        waits = 3 * agreeing(n) + turns * (n - 1)
        return spread.entry_bytes(share, last), (sent, waits, turns)


@dataclasses.dataclass(frozen=True)
class _SpreadPlan:
    """The bytes that one rank would send to spread its sums.

    Attributes:
        scattered: The message sizes of the shares that an owner sends to each rank.
        gathered: The plan of the gather, with shares as parts.
    """

    scattered: ladder.Ladder
    gathered: OwnerPlan

    @classmethod
    def of(cls, plan: OwnerPlan) -> "_SpreadPlan":
        """Makes the plan from that of owners, without its capacity, which is for parts."""
        message = dataclasses.replace(plan.back, capacity=None)
        width = _SHARES.width(plan.width, plan.ranks)
        scattered = message.ladder(width, plan.unit_bytes, plan.ranks)
        width *= plan.ranks
        return cls(scattered, dataclasses.replace(plan, width=width, back=message))

    def entry_bytes(self, share: ladder.Count, count: ladder.Count) -> Any:
        """Returns the bytes that one rank is expected to send.

        Args:
            share: The entries of the fullest share.
            count: The entries of the sum.
        """
        xp, plan = ladder.numpy_of(count), self.gathered
        # The entries that a rank will hold are estimated: hashed shares are nearly equal.
        even = xp.int32(1.05 * xp.float32(count) / plan.ranks)
        even = xp.minimum(even + 1, plan.width)
        return (plan.ranks - 1) * (self.scattered.bytes(share) + plan.pull.bytes(even))


@dataclasses.dataclass(frozen=True)
class RecursiveDoubling(PullEntries):
    """Gathers parts by recursive doubling: partners swap the disjoint sums they hold."""

    def by_entries(self, owned, totals, sets, fullest):
        del totals, sets
        plan, wire = self._plan(owned.plan), owned.wire.narrowed(owned.dtype)

        def send(totals):
            done = doubling.add_up(owned.at_units(totals), wire, plan)
            done = owned.wire.assume_same(done)
            stage = base.add_stages(done.push, done.pull)
            stage = stage._replace(wire=stage.wire + done.scalars)
            return done.total, stage, nonzero_units(done.total)

        return send, plan.most_bytes(fullest), 0.0

    def of_entries(self, plan, load, fullest):
        n, last, plan = load.ranks, math.ceil(load.counts[-1]), self._plan(plan)
        needs = [min(held * fullest, last) for held in doubling.held(n)]
        done = plan.forecast(load.fullest[2:] if load.fullest else needs)
        hops = len(plan.sizes)
        sent = done.push + hops * collectives.all_reduce_bytes(4, n)
        waits = done.messages + (hops + 1) * agreeing(n)
        return plan.most_bytes(fullest), (sent, waits, done.rounds)

    def _plan(self, plan):
        sizes = (plan.unit_bytes,) * len(doubling.held(plan.ranks))
        how = plan.whole_bytes, plan.back.code, plan.back.ratio, True
        return doubling.DoublingPlan(plan.ranks, plan.units, sizes, *how)


@dataclasses.dataclass(frozen=True)
class _Shares(Layout):
    """A layout that cuts each part of another one into even shares, one for each rank.

    A slot of the new part r stands for a pair: the owner of the unit, and the slot in r's
    share of that owner's part.

    Attributes:
        layout: The layout whose parts are cut.
        shares: The layout of each of its parts.
    """

    layout: Layout
    shares: Layout

    @classmethod
    def of(cls, layout: Layout) -> "_Shares":
        """Cuts the parts of a layout by a striped hash."""
        shares = _SHARES.over(layout.width, layout.ranks)
        return cls(layout.size, layout.ranks, layout.ranks * shares.width, layout, shares)

    def assign(self, units):
        part, slot = self.layout.assign(units)
        share, place = self.shares.assign(slot)
        return share, part * self.shares.width + place

    def invert(self, parts, slots):
        owner, place = slots // self.shares.width, slots % self.shares.width
        slot = self.shares.invert(parts, place)
        units = self.layout.invert(owner, jnp.minimum(slot, self.layout.width - 1))
        return jnp.where(slot < self.layout.width, units, self.layout.size)

    def split(self, flags):
        raise NotImplementedError("shares are cut from sums, not from units")

    def join(self, dense):
        raise NotImplementedError("shares are gathered as entries")
