"""Push to owners, sum, pull from owners: the exchange of schemes with Parallelism.

On the wire, with n ranks:

    agree   one pmax of three numbers: see `counts`
    push    all_to_all: to each rank the entries of the units that it owns
    pull    the sums that are not zero, from each rank to all, in one of several ways: see
            `pulls`

Each unit is summed by one rank and copied from there, so all ranks hold the same bits.
`wire.ordered` describes the order in which an owner adds entries.

Without a part memory, the layout splits a set of units by owner. The slots of a part then
ascend, and `messages` takes their bits. With a part memory, Algorithm 1 of Zen
(`units.ownership.memory`) finds the entries of each owner. The bits are then those of the
places in the memory, and the slots of the units in these places are sent as 32 bits each
("coo32"), in the order of the places, as in the paper's COO. Either way an owner adds up
the values that it receives for a slot. If any rank has units that found no place, all ranks
send densely.

A stage that would send more than the dense collective is replaced by it: if the push does
not pay, the exchange is an all-reduce; if only the sums are too dense, they are gathered
densely. So if the parts of the layout have equal widths, no more is sent than by an
all-reduce and the agreed numbers. If one part holds nearly all units, as with `OmniReduce`
with fewer servers than ranks, the dense pull is an all-reduce of the sums, and the bytes of
the push come on top.

For a mean, owners divide the sums that they send, so no rank reads the whole result again;
a mean that underflows to zero is not sent. An all-reduce divides its own result. If values
travel in a narrower dtype, results are divided in their own dtype once they have arrived.

On GPUs the push has a branch of its own, which sends entries or nothing. The pull then
chooses among entries, all sums, and, if nothing was pushed, the all-reduce.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import branches
from sparsejax.schemes import base
from sparsejax.schemes.or_dense import or_dense
from sparsejax.schemes.owners import counts
from sparsejax.schemes.owners.counts import Counts
from sparsejax.schemes.owners.plan import OwnerPlan
from sparsejax.schemes.owners.pulls import (
    Fallback,
    Owned,
    Pull,
    PullEntries,
    nonzero_units,
)
from sparsejax.units import bits
from sparsejax.units.bits import Slots
from sparsejax.units.ownership import Layout
from sparsejax.units.ownership.memory import PartMemory
from sparsejax.units.units import Units, unit_bytes, wide
from sparsejax.wire import channels, collectives, index_codes, messages, ordered
from sparsejax.wire.collectives import Wire
from sparsejax.wire.ladder import Message


# On GPUs the longest messages of a rank to its owners hold one unit in 32.
SHARE = 32


@dataclasses.dataclass(frozen=True)
class PushPull:
    """The options of an exchange by owners, and the exchange itself.

    Attributes:
        push: The options of messages to the owners.
        pull: The options of messages from the owners.
        way: The pull, by which sums return.
        wire_dtype: The dtype of the values while they travel; that of the array if None.
    """

    push: Message
    pull: Message
    way: Pull
    wire_dtype: jax.typing.DTypeLike | None = None

    def __call__(
        self, x: Units, wire: Wire, layout: Layout, mean: bool = False
    ) -> tuple[jax.Array, base.Traffic]:
        """Sums x over the ranks; returns the sum, or the mean, and the traffic.

        Args:
            x: [units] or [units, width], on at least two ranks, not empty.
            wire: The ranks.
            layout: The owner of each unit.
            mean: Whether the sum is divided by the number of ranks.
        """
        stages = self.over(x, wire, layout, mean)
        if not stages.plan.may_pay:
            dense = base.sum_densely(x, None, stages.wire, mean)
            return dense.total, dense.traffic
        return stages(x, stages.count(x, x.present()))

    def over(self, x: Units, wire: Wire, layout: Layout, mean: bool = False) -> "Stages":
        """Returns the stages for arrays like x; for the arguments see `__call__`."""
        wire = wire.narrowed(self.wire_dtype)
        narrow = wire.travelling(x.dtype)
        size, dense = unit_bytes(x, narrow), wire.dense_bytes(x.size, x.dtype)
        plan = self.plan(
            layout.size, layout.ranks, layout.width, size, dense, layout.memory
        )
        owned = Owned(wire, layout, plan, narrow)
        return Stages(wire, layout, self.way, plan, owned, x.dtype, mean)

    def plan(
        self,
        units: int,
        ranks: int,
        width: int,
        unit_bytes: int,
        dense_bytes: float,
        memory: PartMemory | None,
    ) -> OwnerPlan:
        """Returns the message sizes and bytes, for parts of `width` slots: `OwnerPlan`."""
        push, room = self.push, width
        if memory is not None:
            # Slots are in the order of their hashes, so no code of ascending slots applies.
            push = dataclasses.replace(push, code=index_codes.COO32.name)
            room = max(width, memory.room)
        steps = push.ladder(room, unit_bytes, ranks, units, share=SHARE)
        return OwnerPlan(ranks, units, width, unit_bytes, dense_bytes, steps, self.pull)


@dataclasses.dataclass(frozen=True)
class Stages:
    """Push and pull for arrays of one shape, with their static properties.

    Attributes:
        wire: The ranks, and the dtype in which values travel.
        layout: The owner of each unit.
        way: The pull, by which sums return.
        plan: The message sizes and bytes.
        owned: The static properties of the sums of owners.
        dtype: The dtype of the array.
        mean: Whether the sum is divided by the number of ranks.
    """

    wire: Wire
    layout: Layout
    way: Pull
    plan: OwnerPlan
    owned: Owned
    dtype: jnp.dtype
    mean: bool

    def count(self, x: Units, present: jax.Array) -> Counts:
        """Splits the present units among their owners, and agrees on the counts.

        Args:
            x: The units.
            present: Booleans [units], which units are present.
        """
        if self.layout.memory is not None:
            filled = self.layout.memory.fill(x, present)
            return counts.count_filled(filled, self.layout.size, self.wire)
        return counts.count(Slots.of(self.layout.split(present)), self.wire)

    def __call__(self, x: Units, known: Counts) -> tuple[jax.Array, base.Traffic]:
        """Returns the sum and the traffic, after ranks have agreed on their counts."""
        if collectives.at_once() and isinstance(self.way, PullEntries):
            total, push, pull, after, agreed = self._one_after_the_other(x, known)
        else:
            total, push, pull, after, agreed = or_dense(
                self._pays(known),
                functools.partial(self.by_entries, known=known),
                functools.partial(self._all_reduce, known=known),
                x,
            )
        total = self.wire.mean_of(total, self.mean and not self._owners_divide)
        before = known.most.astype(jnp.float32) / self.layout.size
        return total, base.traffic(
            push,
            pull,
            scalars=known.sent + agreed,
            dense=self.plan.dense_bytes,
            before=before,
            after=after / self.layout.size,
        )

    def _pays(self, known):
        return collectives.pays(self.plan.entry_bytes(known.fullest), self.plan.dense_bytes)

    def _all_reduce(self, x, known):
        total, sent = self.wire.all_reduce(x.dense())
        total = self.wire.mean_of(total, self.mean and self._owners_divide)
        half = base.stage(sent / 2, sent / 2, 1, known.imbalance)
        return total, half, half, nonzero_units(total), jnp.float32(0)

    def _one_after_the_other(self, x, known):
        """Pushes and pulls entries if they pay, else all-reduces, by a branch a stage.

        On a GPU the operands of a branch stay in memory until it ends. One branch around
        both stages would keep the bits of the pushed set in memory during the pull.
        """
        pays = self._pays(known)
        push = functools.partial(self.by_entries, known=known, finish=self._with_flags)
        like = jax.eval_shape(push, x)
        nothing = lambda x: jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), like)
        (totals, present), pushed = branches.cond(pays, push, nothing, x)

        def all_reduce(x):
            total, _, half, units, _ = self._all_reduce(x, known)
            return total, half, units

        assert isinstance(self.way, PullEntries)
        instead = Fallback(~pays, all_reduce, x, x.dtype)
        pulled = self.way(self.owned, totals, instead, present)
        push = jax.tree.map(lambda a, b: jnp.where(pays, a, b), pushed, pulled.stage)
        return pulled.total, push, pulled.stage, pulled.units, pulled.scalars

    def by_entries(
        self, x: Units, known: Counts, finish: Callable[[jax.Array], Any] | None = None
    ) -> Any:
        """Sends entries to their owners, which add them up, and the sums to all ranks.

        Args:
            x: The units.
            known: The result of `count` for these units.
            finish: A function of this owner's sums, [width, ...]. If given, the sums are
                not sent to all ranks: the results are what it returns, and the push stage.
        """
        n, width = self.layout.ranks, self.layout.width
        if known.units is not None:
            by = "Algorithm 1, MurmurHash(memory=...),"
            ordered.check_placed(self.wire, x.axes, by)

        sum_dtype = wide(self.dtype)

        def add(totals, sender, slots, values):
            del sender
            return totals.at[slots].add(values.astype(sum_dtype), mode="drop")

        totals, pushed = messages.transmit(
            self.plan.push,
            channels.push(self.wire),
            known.sets,
            self._source(x, known),
            known.fullest,
            messages.Fold(
                jnp.zeros((width, *x.shape[1:]), sum_dtype),
                add,
                in_order=ordered.is_ordered(self.wire, x.axes),
                into=messages.Into(),
                finish=finish or self.travelling,
            ),
            typical=known.most.astype(jnp.float32)[None] / n,
        )
        push = base.stage_of(pushed, known.imbalance)
        if finish is not None:
            return totals, push
        pulled = self.way(self.owned, totals)
        total = pulled.total.astype(x.dtype)
        return total, push, pulled.stage, pulled.units, pulled.scalars

    def travelling(self, totals: jax.Array) -> jax.Array:
        """Casts this owner's sums to the dtype of the wire, and divides them for a mean."""
        totals = totals.astype(self.owned.dtype)
        return self.wire.mean_of(totals, self.mean and self._owners_divide)

    @property
    def _owners_divide(self):
        """Whether means travel; else sums, which are divided in the dtype of the array."""
        return self.owned.dtype == self.dtype

    def _with_flags(self, totals):
        """Casts sums, and returns which rows are non-zero: one kernel computes both."""
        totals = self.travelling(totals)
        return totals, bits.nonzero_units(totals) if totals.ndim > 1 else None

    def _source(self, x, known):
        """Returns the source of the values of this rank's sets, and of their slots."""
        if known.units is None:
            return x.source(self.owned.dtype, self.layout.units_of)
        units = lambda part, place: known.units.at[part, place].get(mode="clip")
        slots = lambda part, place: self.layout.assign(units(part, place))[1]
        return x.source(self.owned.dtype, units)._replace(names=slots)
