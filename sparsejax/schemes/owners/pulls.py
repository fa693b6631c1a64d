"""The pull, which sends every owner's sums to all ranks: the protocol, and Zen's two pulls.

On the wire, with n ranks:

    agree    one pmax: the entries of the owner that has most
    Gather   all_gather of the entries, with each message as long as the fullest
    Whole    all_gather of the dense sums, without a pmax; on GPUs of a sixteenth of them at
             a time, or less, each written to its place before the next is sent

A pull that would send more than all dense sums is replaced by `Whole`: the bytes of both
follow from counts on which all ranks agreed, so all ranks take the same branch. If one part
holds nearly all units, as with `OmniReduce` with fewer servers than ranks, dense parts are
not gathered: the dense pull is an all-reduce of the sums.

The counts of the push bound those of the pull only n times over, so ranks agree again. On
16 ranks messages of that size would take 1.8 times the bytes for the table of an LSTM, and
9% more for random numbers of 1%: even at 400 Gbit/s that takes longer than a pmax.

Each unit was summed by its owner and is copied from there, so all ranks hold the same bits.
`baselines.pulls` has two more pulls.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax import branches
from sparsejax.axes import as_varying, axis_names, varying_axes
from sparsejax.schemes import base
from sparsejax.schemes.forecast import Load, agreeing
from sparsejax.schemes.or_dense import on_copies, or_dense
from sparsejax.schemes.owners import counts
from sparsejax.schemes.owners.plan import OwnerPlan
from sparsejax.units import bits
from sparsejax.units.bits import Slots
from sparsejax.units.ownership import Layout
from sparsejax.wire import channels, messages
from sparsejax.wire.collectives import Wire, at_once


# Bytes, the number of messages that wait for one another, and rounds.
_PullForecast = tuple[float, int, int]


class Pulled(NamedTuple):
    """The result of a pull, the same on all ranks.

    Attributes:
        total: What owners have sent, sums or means, in the order of the units and in the
            dtype of the wire.
        stage: The traffic of the pull.
        units: float32 [], the number of non-zero units.
        scalars: float32 [], the bytes that one rank sent to agree.
    """

    total: jax.Array
    stage: base.Stage
    units: jax.Array
    scalars: jax.Array


@dataclasses.dataclass(frozen=True)
class Owned:
    """The static properties of the sums of owners that a pull sends to all ranks.

    Attributes:
        wire: The ranks.
        layout: The owner of each unit.
        plan: The message sizes and bytes.
        dtype: The dtype of the sums on the wire.
    """

    wire: Wire
    layout: Layout
    plan: OwnerPlan
    dtype: jnp.dtype

    def gather(
        self, totals: jax.Array, sets: Slots, fullest: jax.Array
    ) -> tuple[jax.Array, base.Stage, jax.Array]:
        """Gathers the entries of all owners; returns the total, stage and unit count.

        Args:
            totals: [width, ...], this owner's sums by slot.
            sets: The set of slots whose sums are not zero.
            fullest: int32 [], the entries of the owner that has most.
        """
        size = self.layout.size

        def place(total, owner, slots, values):
            units = self.layout.invert(owner, jnp.minimum(slots, self.layout.width - 1))
            units = bits.unique_places(units, slots < self.layout.width, size)
            return total.at[units].set(values, mode="drop", unique_indices=True)

        total, sent = messages.transmit(
            self.plan.pull,
            channels.pull(self.wire),
            sets,
            messages.Source(totals),
            fullest,
            messages.Fold(
                jnp.zeros((size, *totals.shape[1:]), self.dtype),
                place,
                into=messages.Into(replaces=True, units=self.layout.units_of),
            ),
        )
        units = jnp.sum(sent.counts).astype(jnp.float32)
        ratio = counts.imbalance(fullest, units, self.layout.ranks)
        return total, base.stage_of(sent, ratio), units

    def whole(self, totals: jax.Array) -> tuple[jax.Array, base.Stage, jax.Array]:
        """Sends the dense sums of all owners to all ranks; returns as `gather`."""
        if self.plan.has_even_parts and at_once():
            total, sent = self._by_runs(totals)
        elif self.plan.has_even_parts:
            gathered, sent = self.wire.all_gather(totals)
            total = self.layout.join(gathered)
        else:
            total, sent = self.wire.psum(self.at_units(totals))
        return total, base.stage(sent, sent, 1), nonzero_units(total)

    def _by_runs(self, totals):
        """Gathers dense sums by runs of slots, so that only a run is in memory twice."""
        width, shape = self.layout.width, (self.layout.size, *totals.shape[1:])
        run, runs = self.plan.runs
        # A NumPy constant: an iota would be a kernel.
        owner = jnp.asarray(np.arange(self.layout.ranks, dtype=np.int32)[:, None])

        others = varying_axes(totals) - frozenset(axis_names(self.wire.axis))

        def turn(i, total):
            # All runs have one length and are compiled once, so the last run, which ends at
            # the last slot, overlaps the one before.
            first = jnp.minimum(i * run, width - run)
            # A gather and not a slice: XLA compiles a slice to a copy whose offset the host
            # computes in each turn, and such a loop cannot be part of a CUDA graph.
            taken = first + lax.iota(jnp.int32, run)
            sums = totals.at[taken].get(mode="promise_in_bounds", unique_indices=True)
            gathered, _ = self.wire.all_gather(sums)
            slots = first + lax.broadcasted_iota(jnp.int32, gathered.shape[:2], 1)
            units = self.layout.invert(owner, slots)
            # The units of slots of no unit are past the end, and dropped.
            return total.at[units].set(gathered, mode="drop")

        total = as_varying(jnp.zeros(shape, totals.dtype), others)
        sent = float((self.layout.ranks - 1) * runs * run * self.plan.unit_bytes)
        return lax.fori_loop(0, runs, turn, total), sent

    def at_units(self, totals: jax.Array) -> jax.Array:
        """Returns the sums of this owner at their units, with zeros elsewhere."""
        slots = lax.iota(jnp.int32, self.layout.width)
        units = self.layout.invert(self.wire.rank, slots)
        shape = (self.layout.size, *totals.shape[1:])
        zeros = as_varying(jnp.zeros(shape, totals.dtype), varying_axes(totals))
        return zeros.at[units].set(totals, mode="drop")


def nonzero_units(total: jax.Array) -> jax.Array:
    """Returns the number of non-zero units of a dense total: float32."""
    return bits.count(bits.nonzero_units(total)).astype(jnp.float32)


# A function of this owner's sums that returns the total, the stage and the unit count.
Sender = Callable[[jax.Array], tuple[jax.Array, base.Stage, jax.Array]]


class Fallback(NamedTuple):
    """The alternative to a pull, for when nothing was pushed.

    Attributes:
        wanted: Boolean [], whether it is taken, equal on all ranks.
        send: A function of the operand that returns the total, the stage and the number of
            non-zero units.
        operand: The operand of `send`.
        dtype: The dtype of the total.
    """

    wanted: jax.Array
    send: Callable[[Any], tuple[jax.Array, base.Stage, jax.Array]]
    operand: Any
    dtype: jnp.dtype


class Pull(abc.ABC):
    """A way to send the sums of owners to all ranks. A frozen dataclass."""

    @abc.abstractmethod
    def __call__(self, owned: Owned, totals: jax.Array) -> Pulled:
        """Sends the sums to all ranks.

        Args:
            owned: The static properties of the sums.
            totals: [width, ...], this owner's sums by slot, in the dtype of the wire.
        """

    @abc.abstractmethod
    def forecast(self, plan: OwnerPlan, load: Load, fullest: int) -> _PullForecast:
        """Forecasts the bytes that one rank would send, the messages, and the rounds.

        Args:
            plan: The message sizes and bytes.
            load: The array to sum.
            fullest: The entries of the owner that has most.
        """


class PullEntries(Pull):
    """A pull of entries, or of dense sums where these take no more bytes."""

    def __call__(
        self,
        owned,
        totals,
        instead: Fallback | None = None,
        present: jax.Array | None = None,
    ):
        words = bits.of_units(totals) if present is None else bits.pack(present)
        sets = Slots.of(words[None])
        fullest, agreed = owned.wire.maximum(sets.counts[0])
        by_entries, entry_bytes, cost = self.by_entries(owned, totals, sets, fullest)
        if instead is not None:
            whole = on_copies(owned.whole)
            if owned.plan.has_even_parts:
                whole = lambda wanted, totals: owned.whole(totals)
            send = on_copies(instead.send)

            def wide(total, *rest):
                return total.astype(instead.dtype), *rest

            sides = [
                lambda wanted, totals, x: wide(*by_entries(totals)),
                lambda wanted, totals, x: wide(*whole(wanted, totals)),
                lambda wanted, totals, x: wide(*send(~wanted, x)),
            ]
            pays = entry_bytes < owned.plan.whole_bytes
            side = jnp.where(instead.wanted, 2, jnp.where(pays, 0, 1))
            operands = instead.wanted, totals, instead.operand
            total, stage, units = branches.switch(side, sides, *operands)
            return Pulled(total, stage, units, jnp.float32(agreed + cost))
        total, stage, units = or_dense(
            entry_bytes < owned.plan.whole_bytes,
            by_entries,
            owned.whole,
            totals,
            # A gather does not write over its operand, but an all-reduce does.
            copied=not owned.plan.has_even_parts,
        )
        return Pulled(total, stage, units, jnp.float32(agreed + cost))

    @abc.abstractmethod
    def by_entries(
        self, owned: Owned, totals: jax.Array, sets: Slots, fullest: jax.Array
    ) -> tuple[Sender, jax.Array, float]:
        """Returns a function that sends entries, its bytes, and the bytes to agree.

        Args:
            owned: The static properties of the sums.
            totals: [width, ...], this owner's sums by slot.
            sets: The set of slots whose sums are not zero.
            fullest: int32 [], the entries of the owner that has most.
        """

    @abc.abstractmethod
    def of_entries(
        self, plan: OwnerPlan, load: Load, fullest: int
    ) -> tuple[float, _PullForecast]:
        """Forecasts a pull of entries: bytes for the choice, and then as `forecast`."""

    def forecast(self, plan, load, fullest):
        entry_bytes, sent = self.of_entries(plan, load, fullest)
        return sent if entry_bytes < plan.whole_bytes else whole(plan)


@dataclasses.dataclass(frozen=True)
class Gather(PullEntries):
    """Gathers each owner's entries on all ranks, in one message each."""

    def by_entries(self, owned, totals, sets, fullest):
        def gather(totals):
            return owned.gather(totals, sets, fullest)

        return gather, owned.plan.pull_bytes(fullest), 0.0

    def of_entries(self, plan, load, fullest):
        sent, turns, _ = plan.pull.sent(fullest, plan.route)
        waits = agreeing(plan.ranks) + turns * (plan.ranks - 1)
        return plan.pull_bytes(fullest), (sent, waits, turns)


@dataclasses.dataclass(frozen=True)
class Whole(Pull):
    """Gathers each owner's dense sums on all ranks."""

    def __call__(self, owned, totals):
        return Pulled(*owned.whole(totals), jnp.float32(0))

    def forecast(self, plan, load, fullest):
        return whole(plan)


def whole(plan: OwnerPlan) -> _PullForecast:
    """Returns the bytes, messages and rounds of a dense pull."""
    return plan.whole_bytes, agreeing(plan.ranks) + plan.ranks - 1, 1
