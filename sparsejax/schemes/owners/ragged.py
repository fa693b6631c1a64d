"""Push to owners and pull from them in messages as long as what is there.

On the wire, with n ranks:

    agree   one all_to_all of six numbers a rank: how many entries there are for it, and
            what this rank has: the fullest part, all entries, the imbalance, the bytes that
            it will send and those that it needs
    push    one ragged all_to_all: to each rank the entries of the units that it owns
    agree   one all_gather of a number: how many sums that are not zero each owner has
    pull    one ragged all_to_all: from each rank its sums that are not zero, to all

What a message holds is in `wire.ragged`. A stage chooses once, by numbers that are the same
on all ranks: entries in one round, entries in several where the fullest part is longer than
a buffer, or the dense way. The bytes by which it chooses are those that are sent, of the
rank that sends most, since no message is padded.

If the entries do not pay on the way in, nothing is pushed, and an all-reduce takes the
place of the pull; if only the sums have become too dense, all of them are gathered, zeros
and all. So no more is sent than by an all-reduce and the agreed numbers.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import axes
from sparsejax.schemes import base
from sparsejax.schemes.forecast import Forecast, Load, fullest_part
from sparsejax.schemes.or_dense import on_copies
from sparsejax.schemes.owners import counts
from sparsejax.schemes.owners.counts import Counts
from sparsejax.schemes.owners.pulls import Message, has_even_parts, nonzero_units
from sparsejax.schemes.owners.push_pull import SHARE, PushPull, Stages
from sparsejax.units import bits
from sparsejax.units.ownership import Layout, Ownership
from sparsejax.units.slots import Slots
from sparsejax.units.units import Units
from sparsejax.wire import collectives, messages, ordered
from sparsejax.wire.collectives import Wire
from sparsejax.wire.ragged import Form, Ragged


class Told(NamedTuple):
    """What ranks told one another before entries are pushed, beside the counts.

    Attributes:
        coming: int32 [ranks], how many entries each rank has for this one.
        wire: Bytes that the rank that sends most will send.
        payload: Bytes that the rank that needs most will need.
    """

    coming: jax.Array
    wire: jax.Array
    payload: jax.Array


@dataclasses.dataclass(frozen=True)
class RaggedPushPull(PushPull):
    """How arrays are added up by owners, in messages as long as what is there."""

    def over(self, x: Units, wire: Wire, layout: Layout) -> "RaggedStages":
        """The stages for arrays like x."""
        collectives.check_ragged()
        stages = super().over(x, wire, layout)
        fields = {f.name: getattr(stages, f.name) for f in dataclasses.fields(stages)}
        return RaggedStages(**fields, message=self.push, shape=x.shape[1:])


@dataclasses.dataclass(frozen=True)
class RaggedStages(Stages):
    """Push and pull for arrays of one shape: what is fixed when traced.

    Attributes:
        message: How entries travel to the owners.
        shape: Of one unit's value.
    """

    message: Message
    shape: tuple[int, ...]

    @property
    def may_pay(self) -> bool:
        """Whether any gradient can be sent in fewer bytes than by an all-reduce."""
        return self._most_pulled < self.dense_bytes

    @functools.cached_property
    def pushed(self) -> Form:
        """The messages to owners."""
        return self._form(self.message, self.ladder, "push_capacity")

    @functools.cached_property
    def pulled(self) -> Form:
        """The messages to all."""
        return self._form(self.owned.message, self.owned.ladder, "pull_capacity")

    def _form(self, message, steps, name):
        name = name if message.capacity else None
        ranks, dtype = self.layout.ranks, self.owned.dtype
        return Form(steps, message.code, self.shape, dtype, ranks, name)

    def count(self, x: Units, present: jax.Array) -> Counts:
        """Splits the units that are there among their owners, and agrees on the counts."""
        del x
        n, wire = self.layout.ranks, self.wire
        sets = Slots.of(self.layout.split(present))
        fullest, total = jnp.max(sets.counts), jnp.sum(sets.counts, dtype=jnp.int32)
        others = lax.iota(jnp.int32, n) != wire.rank
        floats = [
            counts.imbalance(fullest, total, n),
            jnp.sum(jnp.where(others, self.pushed.bytes(sets.counts), 0)),
            jnp.sum(jnp.where(others, self.pushed.needed_bytes(sets.counts), 0)),
        ]
        # Positive floats order like their bits.
        floats = lax.bitcast_convert_type(jnp.stack(floats).astype(jnp.float32), jnp.int32)
        own = jnp.concatenate([jnp.stack([fullest, total]), floats])
        own = jnp.broadcast_to(own, (n, own.size))
        told, sent = wire.all_to_all(jnp.concatenate([sets.counts[:, None], own], axis=1))
        most = wire.assume_same(jnp.max(told[:, 1:], axis=0))
        most = wire.same_elsewhere(most)
        pushed, needed = lax.bitcast_convert_type(most[3:], jnp.float32)
        beside = Told(told[:, 0], pushed, needed)
        return Counts(sets, most[:3], sent, told=beside)

    def __call__(self, x: Units, known: Counts) -> tuple[jax.Array, base.Traffic]:
        """The sum, and what was sent for it, once ranks have agreed on their counts."""
        need, most = known.fullest, known.most
        pays = known.told.wire + self._most_pulled < self.dense_bytes
        totals = self._push(x, known, pays)
        sets = Slots.of(bits.of_units(totals)[None])
        there, agreed = self.wire.all_gather(sets.counts[0])
        fullest = self.wire.same_elsewhere(jnp.max(there))
        others = self.layout.ranks - 1
        entries = others * self.pulled.bytes(fullest)
        by_entries = entries < self.owned.whole_bytes
        total, units = self._pull(x, totals, sets, there, fullest, pays, by_entries)

        sent = jnp.where(by_entries, entries, self.owned.whole_bytes)
        needed = others * self.pulled.needed_bytes(fullest)
        needed = jnp.where(by_entries, needed, self.owned.whole_bytes)
        rounds = jnp.where(by_entries, _rounds(fullest, self.pulled), 1)
        summed = jnp.sum(there).astype(jnp.float32)
        ratio = counts.imbalance(fullest, summed, self.layout.ranks)
        ratio = jnp.where(pays & by_entries, ratio, 1)
        told = known.told
        push = self._stage(pays, told.wire, told.payload, _rounds(need, self.pushed))
        pull = self._stage(pays, sent, needed, rounds)
        size = self.layout.size
        return total, base.traffic(
            push._replace(imbalance=known.imbalance),
            pull._replace(imbalance=ratio.astype(jnp.float32)),
            scalars=known.sent + agreed,
            dense=self.dense_bytes,
            before=most.astype(jnp.float32) / size,
            after=units / size,
        )

    def _stage(self, pays, wire, payload, rounds):
        """What a stage sent; that of half an all-reduce where entries do not pay."""
        half = self.dense_bytes / 2
        numbers = (wire, half), (payload, half), (rounds, 1)
        return base.stage(*(jnp.where(pays, jnp.float32(a), b) for a, b in numbers))

    def _push(self, x, known, pays):
        """This owner's sums by slot, in the dtype of the wire; zeros if nothing is sent."""
        zeros = jnp.zeros((self.layout.width, *self.shape), self.sum_dtype)

        def add(totals, sender, slots, values):
            del sender
            return totals.at[slots].add(values.astype(self.sum_dtype), mode="drop")

        def exchange(x):
            source = x.source(self.owned.dtype, self.layout.units_of)
            in_order = ordered.is_ordered(self.wire, x.axes)
            fold = messages.Fold(zeros, add, in_order, messages.Into())
            coming = known.told.coming
            return Ragged(self.pushed, self.wire, known.sets, source, coming, fold)

        need = known.fullest
        sides = [
            lambda x: exchange(x).start,
            lambda x: exchange(x).once(),
            lambda x: exchange(x).several(need),
        ]
        is_sent = pays & (need > 0)
        totals = axes.switch(_side(is_sent, need, self.pushed), sides, x)
        return totals.astype(self.owned.dtype)

    def _pull(self, x, totals, sets, there, fullest, pays, by_entries):
        """The total, in the dtype of x, and how many of its units are not zero."""

        def exchange(totals):
            fold = messages.Fold(*self.owned.placed(totals))
            source = messages.Source(totals)
            return Ragged(self.pulled, self.wire, sets, source, there, fold)

        def all_reduce(x, totals):
            del totals
            total, _ = self.wire.all_reduce(x.dense())
            return total, nonzero_units(total)

        def whole(pays, x, totals):
            del pays, x
            total, _, units = self.owned.whole(totals)
            return total.astype(dtype), units

        units, dtype = jnp.sum(there).astype(jnp.float32), x.dtype
        sides = [
            on_copies(all_reduce),
            whole,
            lambda *given: (exchange(given[-1]).once().astype(dtype), units),
            lambda *given: (exchange(given[-1]).several(fullest).astype(dtype), units),
        ]
        entries = 1 + _side(by_entries, fullest, self.pulled)
        return axes.switch(jnp.where(pays, entries, 0), sides, pays, x, totals)


def _side(is_sent, need, form):
    """0 where entries are not sent, 1 where in one round, 2 where in several."""
    return jnp.where(is_sent, jnp.where(need <= form.room, 1, 2), 0)


def _rounds(need, form):
    """How many rounds send so many entries of the fullest part."""
    return (need + (form.room - 1)) // form.room


def forecast(load: Load, ownership: Ownership, how: PushPull) -> Forecast:
    """Reckons what one rank would send for a load."""
    n, width = load.ranks, ownership.width(load.units, load.ranks)
    unit_bytes = load.unit_bytes(how.wire_dtype)
    dtype = collectives.travelling(jnp.dtype(load.dtype), how.wire_dtype)
    shape = (load.numbers,)
    balanced = ownership.balanced

    def form(message, **share):
        steps = message.ladder(width, unit_bytes, n, load.units, **share)
        return Form(steps, message.code, shape, dtype, n)

    pushed, pulled = form(how.push, share=SHARE), form(how.pull)
    need = fullest_part(load.counts[0], n, width, balanced, load.skewness, sets=n)
    fullest = fullest_part(load.counts[-1], n, width, balanced, load.sum_skewness)
    push = (n - 1) * pushed.mean_bytes(load.counts[0] / n)
    dense = load.all_reduce(how.wire_dtype)
    whole = least = float((n - 1) * width * unit_bytes)
    if not has_even_parts(n, width, load.units):
        size = load.size * unit_bytes // load.numbers
        whole, least = collectives.all_reduce_bytes(size, n), 0.0
    if push + least >= dense.bytes:
        return dense
    pull = (n - 1) * pulled.mean_bytes(fullest)
    turns = -(-need // pushed.room), -(-fullest // pulled.room)
    if pull >= whole:
        pull, turns = whole, (turns[0], 1)
    capacity = max(min(need, pushed.room), min(fullest, pulled.room))
    rounds = sum(turns)
    # An exchange of numbers comes before either way.
    return Forecast(push, pull, (2 + rounds) * (n - 1), capacity, rounds=rounds)
