"""Push to owners, add up, pull from owners: what schemes with Parallelism are made of.

On the wire, with n ranks:

    agree   one pmax of three numbers: the fullest part, the most units, the imbalance
    push    all_to_all: to each rank the entries of the units that it owns
    agree   one pmax: the fullest sum
    pull    the sums that are not zero, from each rank to all, in one of these ways:
            "gather"     all_gather, each part as long as the fullest
            "spread"     all_to_all of the sums to evenly filled parts, then all_gather
            "doubling"   recursive doubling; what is held doubles with each message
            "dense"      all_gather of the sums, zeros and all

Each unit is added up in one place and copied from there, so all ranks hold the same bits.

"spread" is a broadcast by every owner at once, made of a scatter and an all-gather: an
owner hands a share of its sums to each rank, and each rank sends its shares to all. An
owner that has nearly everything then sends little more than the others. Under a hash parts
are even from the start, and "gather" does the same in one message.

A stage that would send more than the dense collective becomes it: if the entries do not pay
on the way in, the whole is an all-reduce; if only the sums have become too dense, they are
gathered densely. So where the parts of the layout have equal widths no more is sent than
by an all-reduce and the agreed numbers. Where any part may hold nearly all units, as with
thresholds that follow the data, the dense way out is an all-reduce of the sums, and what
was pushed before comes on top.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.axes import as_varying, varying_axes
from sparsejax.schemes import base, doubling
from sparsejax.schemes.or_dense import or_dense
from sparsejax.units import bits
from sparsejax.units.dtypes import unit_bytes, wide
from sparsejax.units.ownership import Layout, Shares
from sparsejax.units.slots import Bits
from sparsejax.units.units import Units
from sparsejax.wire import channels, collectives, ladder, messages
from sparsejax.wire.collectives import Wire


# Parts are as good as even if together they have so many times as many slots as units.
EVEN = 1.5

PULLS = ("gather", "spread", "doubling", "dense")


class Options(NamedTuple):
    """How the entries travel: what a scheme built on owners lets its users choose."""

    push_code: str = "auto"
    pull_code: str = "auto"
    ratio: float = 2.0
    wire_dtype: jax.typing.DTypeLike | None = None
    pull: str = "gather"
    push_capacity: int | None = None
    pull_capacity: int | None = None


def reduce(
    x: Units,
    wire: Wire,
    layout: Layout,
    options: Options,
) -> tuple[jax.Array, base.Traffic]:
    """The sum of x over the axis, and what was sent for it.

    Args:
        x: [units] or [units, width], on at least two ranks, not empty.
        wire: The ranks.
        layout: Who owns which unit.
        options: How the entries travel.
    """
    run = owners(x, wire, layout, options)
    if not run.may_pay(x):
        dense = base.sum_densely(x, None, run.wire)
        return dense.total, dense.traffic
    return run(x, run.agree(x.present()))


def owners(x: Units, wire: Wire, layout: Layout, options: Options) -> "Owners":
    """The stages for arrays like x."""
    n, wire = layout.ranks, wire.narrowed(options.wire_dtype)
    narrow = wire.travelling(x.dtype)
    size = unit_bytes(x, narrow)
    push = (options.push_code, options.ratio, options.push_capacity)
    pull = (options.pull_code, options.ratio, options.pull_capacity)
    return Owners(
        wire,
        layout,
        options,
        narrow,
        wide(x.dtype),
        ladder.ladder(layout.width, size, n, *push),
        ladder.ladder(layout.width, size, n, *pull),
    )


class Agreed(NamedTuple):
    """A rank's units by owner, and the counts that all ranks agreed on.

    Attributes:
        sets: This rank's units by owner.
        fullest: Entries of the fullest part of all ranks.
        most: Entries of the rank that has most.
        imbalance: Of the rank whose parts are least even.
        sent: Bytes that one rank sent for it.
    """

    sets: Bits
    fullest: jax.Array
    most: jax.Array
    imbalance: jax.Array
    sent: float


@dataclasses.dataclass(frozen=True)
class Owners:
    """The scheme on one array: what is fixed, with a method a stage."""

    wire: Wire
    layout: Layout
    options: Options
    narrow: jnp.dtype
    wide: jnp.dtype
    push_ladder: ladder.Ladder
    pull_ladder: ladder.Ladder

    def may_pay(self, x):
        """Whether any gradient can be sent in fewer bytes than by an all-reduce.

        Parts have whole words of slots; with few units a rank, most belong to none.
        """
        n = self.layout.ranks
        least = (n - 1) * 4 * self.push_ladder.rungs[0].words
        if self._bounded():
            least += self._dense_pull_bytes()
        return least < self._all_reduce_bytes(x)

    def expected_bytes(self, x, pushed: jax.Array, pulled: jax.Array) -> jax.Array:
        """Bytes that one rank sends where the fullest part has so many entries.

        Args:
            x: The array.
            pushed: Entries of the fullest part of a rank.
            pulled: Entries of the fullest part of the sum.
        """
        pull = (self._n - 1) * self.pull_ladder.bytes(pulled)
        pull = jnp.minimum(pull, self._dense_pull_bytes())
        push = (self._n - 1) * self.push_ladder.bytes(pushed)
        dense = self._all_reduce_bytes(x)
        bound = push + (self._dense_pull_bytes() if self._bounded() else 0.0)
        sparsely = self.may_pay(x) & (bound < dense)
        return jnp.where(sparsely, push + pull, dense)

    def agree(self, present: jax.Array) -> "Agreed":
        """Splits the units that are there among their owners, and counts them."""
        lanes = self.layout.ranks * self.push_ladder.tile
        sets = Bits.of(self.layout.split(present), lanes)
        count = jnp.sum(sets.counts, dtype=jnp.int32)
        fullest = jnp.max(sets.counts)
        mean = count.astype(jnp.float32) / self.layout.ranks
        imbalance = jnp.where(count > 0, fullest / jnp.maximum(mean, 1e-6), 1.0)
        # Positive floats order like their bits, so one pmax serves for all three.
        as_int = lax.bitcast_convert_type(imbalance.astype(jnp.float32), jnp.int32)
        agreed, sent = self.wire.maximum(jnp.stack([fullest, count, as_int]))
        worst = lax.bitcast_convert_type(agreed[2], jnp.float32)
        return Agreed(sets, agreed[0], agreed[1], worst, sent)

    def __call__(self, x: Units, known: "Agreed") -> tuple[jax.Array, base.Traffic]:
        """The sum, and what was sent for it, once ranks have agreed on their counts."""
        n = self.layout.ranks
        _, fullest, most, imbalance, agreed = known
        dense = self._all_reduce_bytes(x)
        push_bytes = (n - 1) * self.push_ladder.bytes(fullest)
        pull_bytes = self._dense_pull_bytes() if self._bounded() else 0.0

        def all_reduce(x):
            total, sent = self.wire.all_reduce(x.dense())
            half = base.stage(sent / 2, sent / 2, 1, imbalance)
            after = jnp.sum(bits.nonzero_units(total)).astype(jnp.float32)
            return total, half, half, after, jnp.float32(0)

        total, push, pull, after, second = or_dense(
            push_bytes + pull_bytes,
            dense,
            functools.partial(self._by_entries, known=known),
            all_reduce,
            x,
        )
        before = most.astype(jnp.float32) / self.layout.size
        return total, base.traffic(
            push,
            pull,
            scalars=agreed + second,
            dense=dense,
            before=before,
            after=after / self.layout.size,
        )

    def _by_entries(self, x, known):
        """Sends entries to their owners, which add them up, and the sums to all."""
        n, width = self.layout.ranks, self.layout.width
        part = lax.broadcasted_iota(jnp.int32, (n, 1), 0)

        def add(totals, slots, values):
            return totals.at[slots.reshape(-1)].add(
                values.astype(self.wide).reshape(-1, *x.shape[1:]), mode="drop"
            )

        totals, pushed = messages.transmit(
            self.push_ladder,
            channels.push(self.wire),
            known.sets,
            x.source(self.narrow, functools.partial(self.layout.invert, part)),
            known.fullest,
            messages.Fold(jnp.zeros((width, *x.shape[1:]), self.wide), add),
            typical=known.most.astype(jnp.float32)[None] / n,
        )
        total, pull, after, scalars = self._pull(totals, x)
        return total, base.stage_of(pushed, known.imbalance), pull, after, scalars

    def _pull(self, totals, x):
        """Gives all ranks all sums."""
        totals = totals.astype(self.narrow)
        if self.options.pull == "dense":
            total, stage, units = self._dense(totals)
            return total.astype(x.dtype), stage, units, jnp.float32(0)
        sets = Bits.of(bits.of_units(totals)[None], self.pull_ladder.tile)
        fullest, agreed = self.wire.maximum(sets.counts[0])
        if self.options.pull == "gather":
            sparse = functools.partial(self._gather, sets=sets, fullest=fullest)
            pull_bytes = (self._n - 1) * self.pull_ladder.bytes(fullest)
        elif self.options.pull == "doubling":
            sparse = self._doubling
            pull_bytes = self._doubling_bytes(fullest)
        else:
            spread = Shares.of(self.layout)
            sparse, pull_bytes, cost = self._spread(spread, totals, sets.counts[0])
            agreed += cost
        total, pull, units = or_dense(
            pull_bytes, self._dense_pull_bytes(), sparse, self._dense, totals
        )
        return total.astype(x.dtype), pull, units, jnp.float32(agreed)

    def _gather(self, totals, sets, fullest):
        """Gathers the entries of all owners."""
        part = lax.broadcasted_iota(jnp.int32, (self.layout.ranks, 1), 0)
        size = self.layout.size

        def place(total, slots, values):
            units = self.layout.invert(part, jnp.minimum(slots, self.layout.width - 1))
            real = (slots < self.layout.width).reshape(-1)
            units = bits.apart(units.reshape(-1), real, size)
            values = values.reshape(-1, *totals.shape[1:])
            return total.at[units].set(values, mode="drop", unique_indices=True)

        total, sent = messages.transmit(
            self.pull_ladder,
            channels.pull(self.wire),
            sets,
            messages.Source(totals),
            fullest,
            messages.Fold(jnp.zeros((size, *totals.shape[1:]), self.narrow), place),
        )
        units = jnp.sum(sent.counts).astype(jnp.float32)
        mean = units / self.layout.ranks
        imbalance = jnp.where(units > 0, fullest / jnp.maximum(mean, 1e-6), 1.0)
        return total, base.stage_of(sent, imbalance), units

    def _dense(self, totals):
        """Gathers all sums, zeros and all."""
        if self._bounded():
            gathered, sent = self.wire.all_gather(totals)
            total = self.layout.join(gathered)
        else:
            total, sent = self.wire.psum(self._own(totals))
        # Of the total, as after an all-reduce: then both count with the same kernels.
        units = jnp.sum(bits.nonzero_units(total)).astype(jnp.float32)
        return total, base.stage(sent, sent, 1), units

    def _own(self, totals):
        """The sums of this rank at their units, zeros elsewhere."""
        units = self.layout.invert(self.wire.rank, lax.iota(jnp.int32, self.layout.width))
        shape = (self.layout.size, *totals.shape[1:])
        zeros = as_varying(jnp.zeros(shape, totals.dtype), varying_axes(totals))
        return zeros.at[units].set(totals, mode="drop")

    def _doubling(self, totals):
        """Every rank starts with its own part; what two partners hold is disjoint."""
        done = self._doubler()(self._own(totals))
        done = self.wire.assume_same(done)
        units = jnp.sum(bits.nonzero_units(done.total)).astype(jnp.float32)
        return done.total, base.add_stages(done.push, done.pull), units

    def _doubler(self):
        options = self.options
        return doubling.Doubling(
            self.wire.narrowed(self.narrow), options.pull_code, options.ratio, by_bound=True
        )

    def _doubling_bytes(self, fullest):
        """The most that a recursive doubling sends, what it agrees on left out."""
        unit_bytes = self.pull_ladder.unit_bytes
        like = jnp.empty((self.layout.size, unit_bytes), jnp.uint8)
        steps = self._doubler().ladder(like, jnp.uint8)
        total, held = jnp.float32(0), 1
        for _ in range(doubling.hops(self._n)):
            total += steps.bytes(jnp.minimum(held * fullest, self.layout.size))
            held = min(2 * held, self._n)
        if self._n & (self._n - 1):
            total += steps.bytes(jnp.minimum(self._n * fullest, self.layout.size))
        return total

    def _spread(self, spread, totals, count):
        """How every rank is handed an even share of each owner's sums, and its bytes."""
        n, inner = self._n, spread.shares
        unit_bytes, options = self.pull_ladder.unit_bytes, self.options
        push, pull = (
            ladder.ladder(width, unit_bytes, n, options.pull_code, options.ratio)
            for width in (inner.width, spread.width)
        )
        sets = Bits.of(inner.split(bits.nonzero_units(totals)), n * push.tile)
        fullest, agreed = self.wire.maximum(jnp.max(sets.counts))
        whole, counted = self.wire.psum(count)
        whole = self.wire.same_elsewhere(whole)
        # What a rank will hold is known when it holds it; even shares are nearly equal.
        share = (1.05 * whole.astype(jnp.float32) / n).astype(jnp.int32)
        share = jnp.minimum(share + 1, spread.width)
        total_bytes = (n - 1) * (push.bytes(fullest) + pull.bytes(share))
        part = lax.broadcasted_iota(jnp.int32, (n, 1), 0)

        def place(shares, slots, values):
            at = jnp.where(slots < inner.width, part * inner.width + slots, spread.width)
            values = values.reshape(-1, *totals.shape[1:])
            return shares.at[at.reshape(-1)].set(values, mode="drop")

        def sparse(totals):
            shares, sent = messages.transmit(
                push,
                channels.push(self.wire),
                sets,
                messages.Source(totals, units=functools.partial(inner.invert, part)),
                fullest,
                messages.Fold(
                    jnp.zeros((spread.width, *totals.shape[1:]), self.narrow), place
                ),
                typical=whole.astype(jnp.float32)[None] / n**2,
            )
            run = dataclasses.replace(self, layout=spread, pull_ladder=pull)
            held = Bits.of(bits.of_units(shares)[None], pull.tile)
            most, cost = self.wire.maximum(held.counts[0])
            total, stage, units = run._gather(shares, held, most)
            first = base.stage_of(sent._replace(wire=sent.wire + cost))
            return total, base.add_stages(first, stage), units

        return sparse, total_bytes, agreed + counted

    @property
    def _n(self):
        return self.layout.ranks

    def _bounded(self):
        """Whether parts have about equal widths, so that gathering them whole is cheap."""
        room = self._n * self.layout.width
        return room <= EVEN * self.layout.size + 32 * self._n

    def _dense_pull_bytes(self):
        """Bytes that one rank sends to give its sums to all, zeros and all."""
        unit = self.push_ladder.unit_bytes
        if self._bounded():
            return float((self._n - 1) * self.layout.width * unit)
        return collectives.all_reduce_bytes(self.layout.size * unit, self._n)

    def _all_reduce_bytes(self, x):
        return self.wire.dense_bytes(x.size, x.dtype)
