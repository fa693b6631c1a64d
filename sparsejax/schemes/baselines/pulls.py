"""Two more ways in which owners' sums come back to all ranks; see `owners.pulls`.

On the wire, with n ranks:

    Spread              all_to_all of the sums to evenly filled parts, then all_gather
    RecursiveDoubling   what a rank holds doubles with each message

`Spread` is a broadcast by every owner at once, made of a scatter and an all-gather: an
owner hands a share of its sums to each rank, and each rank sends its shares to all. An
owner that has nearly everything then sends little more than the others. Under a hash parts
are even from the start, and `Gather` does the same in one message.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from sparsejax.schemes import base, doubling
from sparsejax.schemes.forecast import agreeing, fullest_part, merged
from sparsejax.schemes.owners.plan import Message
from sparsejax.schemes.owners.pulls import Owned, PullEntries, nonzero_units, whole
from sparsejax.units import bits
from sparsejax.units.ownership import Layout, StripedHash
from sparsejax.units.slots import Slots
from sparsejax.wire import channels, ladder, messages
from sparsejax.wire.ladder import sent_bytes


@dataclasses.dataclass(frozen=True)
class Spread(PullEntries):
    """Even shares of each owner's sums to every rank, and those of a rank to all."""

    def by_entries(self, owned, totals, sets, fullest):
        n, wire = owned.layout.ranks, owned.wire
        spread = _Shares.of(owned.layout)
        inner, message = spread.shares, _uncapped(owned.plan.back)
        scattered = message.ladder(inner.width, owned.plan.unit_bytes, n)
        plan = dataclasses.replace(owned.plan, width=spread.width, back=message)
        shared = dataclasses.replace(owned, layout=spread, plan=plan)
        shares = Slots.of(inner.split(bits.nonzero_units(totals)))
        fullest_share, agreed = wire.maximum(jnp.max(shares.counts))
        count, counted = wire.psum(sets.counts[0])
        count = wire.same_elsewhere(count)
        # What a rank will hold is known when it holds it; even shares are nearly equal.
        even = (1.05 * count.astype(jnp.float32) / n).astype(jnp.int32)
        even = jnp.minimum(even + 1, spread.width)
        entry_bytes = (n - 1) * (scattered.bytes(fullest_share) + plan.pull.bytes(even))

        def place(held, owner, slots, values):
            at = jnp.where(slots < inner.width, owner * inner.width + slots, spread.width)
            return held.at[at].set(values, mode="drop")

        def send(totals):
            held, sent = messages.transmit(
                scattered,
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

        return send, entry_bytes, agreed + counted

    def forecast(self, plan, load, fullest):
        n, last = load.ranks, load.counts[-1]
        message = _uncapped(plan.back)
        shares = StripedHash().width(plan.width, n)
        inner = message.ladder(shares, plan.unit_bytes, n)
        outer = message.ladder(n * shares, plan.unit_bytes, n, load.units)
        share = fullest_part(fullest, n, shares, True, 1.0, sets=n)
        even = fullest_part(last, n, n * shares, True, 1.0)
        scattered, turns, _ = sent_bytes(inner, share, n - 1)
        gathered, more, _ = sent_bytes(outer, even, n - 1)
        turns += more
        if scattered + gathered >= plan.whole_bytes:
            return whole(plan)
        return scattered + gathered, 3 * agreeing(n) + turns * (n - 1), turns


@dataclasses.dataclass(frozen=True)
class RecursiveDoubling(PullEntries):
    """Recursive doubling: every rank starts with its part; what two hold is disjoint."""

    def by_entries(self, owned, totals, sets, fullest):
        del totals, sets
        doubler = doubling.Doubling(
            owned.wire.narrowed(owned.dtype),
            owned.plan.back.code,
            owned.plan.back.ratio,
            by_bound=True,
        )

        def send(totals):
            done = doubler(owned.at_units(totals))
            done = owned.wire.assume_same(done)
            stage = base.add_stages(done.push, done.pull)
            return done.total, stage, nonzero_units(done.total)

        return send, _most_bytes(owned, doubler, fullest), 0.0

    def forecast(self, plan, load, fullest):
        n, last = load.ranks, load.counts[-1]
        units = -(-load.units // 32) * 32
        steps = ladder.ladder(units, plan.unit_bytes, 1, plan.back.code, plan.back.ratio)
        pulled, waits, rounds = 0.0, 0, 0
        for held in merged(n)[:-1]:
            part = min(held * fullest, math.ceil(last))
            sent, turns, _ = sent_bytes(steps, part, 1)
            pulled, waits = pulled + sent, waits + turns + agreeing(n)
            rounds += turns
        if pulled >= plan.whole_bytes:
            return whole(plan)
        return pulled, waits, rounds


def _uncapped(message: Message) -> Message:
    """A message of other parts than those whose counts were foreseen."""
    return dataclasses.replace(message, capacity=None)


def _most_bytes(owned: Owned, doubler: doubling.Doubling, fullest: jax.Array):
    """The most that a recursive doubling sends, what it agrees on left out."""
    n, size = owned.layout.ranks, owned.layout.size
    like = jnp.empty((size, owned.plan.unit_bytes), jnp.uint8)
    steps = doubler.ladder(like, jnp.uint8)
    total, held = jnp.float32(0), 1
    # Each part is cut first: int32 may not hold that many entries of uneven ones.
    of = lambda held: held * jnp.minimum(fullest, -(-size // held))
    for _ in range(doubling.hops(n)):
        total += steps.bytes(jnp.minimum(of(held), size))
        held = min(2 * held, n)
    if n & (n - 1):
        total += steps.bytes(jnp.minimum(of(n), size))
    return total


@dataclasses.dataclass(frozen=True)
class _Shares(Layout):
    """Every part of a layout cut into even shares, one for each rank.

    A slot of the new part r is a pair: whose unit it is, and where in r's share of it.

    Attributes:
        layout: The layout whose parts are cut.
        shares: How each of its parts is.
    """

    layout: Layout
    shares: Layout

    @classmethod
    def of(cls, layout: Layout) -> "_Shares":
        """Cuts the parts of a layout by a striped hash, another than is usual for parts."""
        shares = StripedHash(seed=0x1B56C4E9).over(layout.width, layout.ranks)
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
