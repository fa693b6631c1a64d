"""Balanced Parallelism: every unit is added up by one rank, and all ranks get equal shares.

Zen, definition 6 and section 3. On the wire, with n ranks:

    agree   one pmax of three numbers: the fullest part, the most units, the imbalance
    push    all_to_all: to each rank the entries of the units that it owns
    agree   one pmax: the fullest sum
    pull    all_gather: the sums that are not zero, from each rank to all

Each unit is added up in one place and copied from there, so all ranks hold the same bits.
Balance makes the messages fit: with a hash the fullest part is barely fuller than the mean,
and the rung of the ladder that it needs wastes little.

A stage that would send more than the dense collective becomes it: if the entries do not pay
on the way in, the whole is an all-reduce; if only the sums have become too dense, they are
gathered densely. So no more is sent than by an all-reduce and the four agreed numbers.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import bits, exchange, index_codes, ladder, wire
from sparsejax._compat import as_varying, varying_axes
from sparsejax.ownership import Layout, Ownership, StripedHash
from sparsejax.schemes import base


@dataclasses.dataclass(frozen=True)
class BalancedParallelism(base.Scheme):
    """Push to the owners, add up, pull from the owners.

    Attributes:
        ownership: Who owns which unit.
        push_code: How indices travel to the owners: "coo32", "coo16", "coo8", "bitmap", or
            "auto" for the cheapest at each message size.
        pull_code: The same on the way back.
        ratio: How far apart the message sizes are; larger compiles faster, and pads more or
            takes more rounds.
        wire_dtype: The dtype of the values while they travel; that of x if None. Sums are
            taken in float32 or wider all the same.
    """

    ownership: Ownership = StripedHash()
    push_code: str = "auto"
    pull_code: str = "auto"
    ratio: float = 2.0
    wire_dtype: jax.typing.DTypeLike | None = None

    def __post_init__(self):
        index_codes.parse(self.push_code)
        index_codes.parse(self.pull_code)
        ladder.check_ratio(self.ratio)

    @property
    def needs_ranks(self):
        return self.ownership.needs_tables

    def init(self, like, ranks):
        return self.ownership.tables(like.shape[0], ranks)

    def __call__(self, x, state, axis_name, *, present=None):
        n = wire.ranks(axis_name)
        if n == 1 or x.size == 0:
            return base.nothing_to_send(x, state, axis_name)
        base.check_units(x)
        layout = self.ownership.over(x.shape[0], n, state)
        narrow = wire.travelling(x.dtype, self.wire_dtype)
        unit_bytes = x.size // x.shape[0] * narrow.itemsize
        run = _Run(
            axis_name,
            layout,
            narrow,
            jnp.promote_types(x.dtype, jnp.float32),
            ladder.ladder(layout.width, unit_bytes, n, self.push_code, self.ratio),
            ladder.ladder(layout.width, unit_bytes, n, self.pull_code, self.ratio),
            varying_axes(x) - varying_axes(lax.axis_index(axis_name)),
        )
        if not run.may_pay(x):
            return base.sum_densely(x, state, axis_name, self.wire_dtype)
        total, traffic = run(x, bits.nonzero_units(x) if present is None else present)
        return base.Reduced(total, None, state, traffic)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The scheme on one array: what is fixed, with a method a stage."""

    axis_name: wire.AxisName
    layout: Layout
    narrow: jnp.dtype
    wide: jnp.dtype
    push_ladder: ladder.Ladder
    pull_ladder: ladder.Ladder
    other_axes: frozenset[str]  # over which x varies beside the one it is added up over

    def may_pay(self, x):
        """Whether any gradient can be sent in fewer bytes than by an all-reduce.

        Parts have whole words of slots; with few units a rank, most belong to none.
        """
        n = self.layout.ranks
        least = (n - 1) * 4 * self.push_ladder.rungs[0].words + self._dense_pull_bytes()
        return least < wire.all_reduce_cost(x.size, x.dtype, self.narrow, n)

    def __call__(self, x, present):
        n = self.layout.ranks
        sets = bits.bit_sets(self.layout.split(present))
        fullest, most, imbalance, agreed = self._agree(sets)
        dense = wire.all_reduce_cost(x.size, x.dtype, self.narrow, n)
        push_bytes = (n - 1) * self.push_ladder.bytes(fullest)
        worth = push_bytes + self._dense_pull_bytes() < dense

        def sparse(x):
            totals, push = self._push(x, sets, fullest, most)
            total, pull, after, second = self._pull(totals, x)
            return total, base.stage_of(push, imbalance), pull, after, second

        def all_reduce(x):
            total, sent = wire.all_reduce(x, self.axis_name, self.narrow)
            half = base.stage(sent / 2, sent / 2, 1, imbalance)
            one = jnp.float32(1)
            return total, half, half, one, jnp.float32(0)

        total, push, pull, after, second = lax.cond(
            worth, self._typed(sparse), self._typed(all_reduce), x
        )
        before = most.astype(jnp.float32) / self.layout.size
        scalars = agreed + second
        return total, base.traffic(
            push, pull, scalars=scalars, dense=dense, before=before, after=after
        )

    def _typed(self, function):
        """Gives the results of both sides of a branch the same type."""
        return lambda x: as_varying(function(x), self.other_axes)

    def _agree(self, sets):
        """The fullest part, the most units and the worst imbalance of all ranks."""
        count = jnp.sum(sets.counts, dtype=jnp.int32)
        fullest = jnp.max(sets.counts)
        mean = count.astype(jnp.float32) / self.layout.ranks
        imbalance = jnp.where(count > 0, fullest / jnp.maximum(mean, 1e-6), 1.0)
        # Positive floats order like their bits, so one pmax serves for all three.
        as_int = lax.bitcast_convert_type(imbalance.astype(jnp.float32), jnp.int32)
        agreed, sent = wire.maximum(jnp.stack([fullest, count, as_int]), self.axis_name)
        worst = lax.bitcast_convert_type(agreed[2], jnp.float32)
        return agreed[0], agreed[1], worst, sent

    def _push(self, x, sets, fullest, most):
        """Adds up what all ranks have for the units that this rank owns."""
        n, width = self.layout.ranks, self.layout.width
        part = lax.broadcasted_iota(jnp.int32, (n, 1), 0)

        def values_at(slots):
            units = self.layout.invert(part, slots)
            return x.at[units].get(mode="clip").astype(self.narrow)

        def add(totals, slots, values):
            return totals.at[slots.reshape(-1)].add(
                values.astype(self.wide).reshape(-1, *x.shape[1:]), mode="drop"
            )

        return exchange.transmit(
            self.push_ladder,
            wire.push_channel(self.axis_name),
            sets,
            values_at,
            fullest,
            add,
            jnp.zeros((width, *x.shape[1:]), self.wide),
            typical=most.astype(jnp.float32)[None] / n,
        )

    def _pull(self, totals, x):
        """Gives all ranks all sums."""
        totals = totals.astype(self.narrow)
        sets = bits.bit_sets(bits.pack(bits.nonzero_units(totals))[None])
        fullest, second = wire.maximum(sets.counts[0], self.axis_name)
        pull_bytes = (self.layout.ranks - 1) * self.pull_ladder.bytes(fullest)

        def sparse(totals):
            total, sent = self._gather_entries(totals, sets, fullest)
            units = jnp.sum(sent.counts).astype(jnp.float32)
            mean = units / self.layout.ranks
            imbalance = jnp.where(units > 0, fullest / jnp.maximum(mean, 1e-6), 1.0)
            return total, base.stage_of(sent, imbalance), units

        def dense(totals):
            gathered, sent = wire.all_gather(totals, self.axis_name)
            units = jnp.sum(bits.nonzero_units(gathered.reshape(-1, *totals.shape[1:])))
            return (
                self.layout.join(gathered),
                base.stage(sent, sent, 1),
                units.astype(jnp.float32),
            )

        total, pull, units = lax.cond(
            pull_bytes < self._dense_pull_bytes(),
            self._typed(sparse),
            self._typed(dense),
            totals,
        )
        return total.astype(x.dtype), pull, units / self.layout.size, jnp.float32(second)

    def _gather_entries(self, totals, sets, fullest):
        part = lax.broadcasted_iota(jnp.int32, (self.layout.ranks, 1), 0)
        size = self.layout.size

        def place(total, slots, values):
            units = self.layout.invert(part, jnp.minimum(slots, self.layout.width - 1))
            # Where there is no entry the index lies behind the end, each its own.
            spare = size + lax.iota(jnp.int32, slots.size).reshape(slots.shape)
            units = jnp.where(slots < self.layout.width, units, spare).reshape(-1)
            values = values.reshape(-1, *totals.shape[1:])
            return total.at[units].set(values, mode="drop", unique_indices=True)

        return exchange.transmit(
            self.pull_ladder,
            wire.pull_channel(self.axis_name),
            sets,
            lambda slots: totals.at[slots].get(mode="clip"),
            fullest,
            place,
            jnp.zeros((size, *totals.shape[1:]), self.narrow),
        )

    def _dense_pull_bytes(self):
        """Bytes that one rank sends to give its sums to all, zeros and all."""
        unit = self.push_ladder.unit_bytes
        return (self.layout.ranks - 1) * self.layout.width * unit
