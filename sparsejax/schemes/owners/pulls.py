"""Pull: every owner's sums to all ranks. The protocol, and the two ways that Zen needs.

On the wire, with n ranks:

    agree    one pmax: the entries of the owner that has most
    Gather   all_gather of the entries, each part as long as the fullest
    Whole    all_gather of the sums, zeros and all, and nothing to agree on; on GPUs of a
             sixteenth of them at a time, or less, which are put in their places before
             the next

A pull that would send more than all sums, zeros and all, becomes `Whole`: the bytes of both
follow from counts on which all ranks agreed, so all ranks take the same side. Where a
part holds nearly all units, as of `OmniReduce` with fewer servers than ranks, parts are not
gathered whole: the dense way out is an all-reduce of the sums.

Each unit was added up by its owner and is copied from there, so all ranks hold the same
bits. Two more ways are in `baselines.pulls`.
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
from sparsejax.wire.collectives import Wire


# Bytes, messages that wait for one another, and rounds.
_PullForecast = tuple[float, int, int]
# On GPUs no more collectives than this give all sums to all ranks.
_RUNS = 16


class Pulled(NamedTuple):
    """What all ranks have after a pull.

    Attributes:
        total: The sums in the order of the units, in the dtype of the wire.
        stage: What one rank sent.
        units: float32: how many units are non-zero.
        scalars: Bytes that one rank sent to agree.
    """

    total: jax.Array
    stage: base.Stage
    units: jax.Array
    scalars: jax.Array


@dataclasses.dataclass(frozen=True)
class Owned:
    """Sums by owner, which all ranks are to have: what is fixed when traced.

    Attributes:
        wire: The ranks.
        layout: Who owns which unit.
        plan: The message sizes, and what is sent.
        dtype: Of the sums while they travel.
    """

    wire: Wire
    layout: Layout
    plan: OwnerPlan
    dtype: jnp.dtype

    def gather(
        self, totals: jax.Array, sets: Slots, fullest: jax.Array
    ) -> tuple[jax.Array, base.Stage, jax.Array]:
        """Gathers the entries of all owners: their total, what was sent, how many units.

        Args:
            totals: [width, ...], this owner's sums by slot.
            sets: Which of them are not zero.
            fullest: How many the owner with most has.
        """
        size = self.layout.size

        def place(total, owner, slots, values):
            units = self.layout.invert(owner, jnp.minimum(slots, self.layout.width - 1))
            units = bits.apart(units, slots < self.layout.width, size)
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
        """Gives all ranks the sums of all owners, zeros and all."""
        if self.plan.has_even_parts and self.wire.at_once:
            total, sent = self._by_runs(totals)
        elif self.plan.has_even_parts:
            gathered, sent = self.wire.all_gather(totals)
            total = self.layout.join(gathered)
        else:
            total, sent = self.wire.psum(self.at_units(totals))
        return total, base.stage(sent, sent, 1), nonzero_units(total)

    def _by_runs(self, totals):
        """All sums, some slots of all owners at a time, so that few are there twice."""
        width, shape = self.layout.width, (self.layout.size, *totals.shape[1:])
        run = bits.WORD * -(-width // (_RUNS * bits.WORD))
        runs = -(-width // run)
        # A constant: a kernel would make it.
        owner = jnp.asarray(np.arange(self.layout.ranks, dtype=np.int32)[:, None])

        others = varying_axes(totals) - frozenset(axis_names(self.wire.axis))

        def turn(i, total):
            # The last run ends where the slots do, and has some of the one before: all have
            # one length, and are compiled once.
            first = jnp.minimum(i * run, width - run)
            # A gather: of a slice XLA makes a copy whose place the host works out, turn by
            # turn, and a loop around one cannot be part of a CUDA graph.
            taken = first + lax.iota(jnp.int32, run)
            sums = totals.at[taken].get(mode="promise_in_bounds", unique_indices=True)
            gathered, _ = self.wire.all_gather(sums)
            slots = first + lax.broadcasted_iota(jnp.int32, gathered.shape[:2], 1)
            units = self.layout.invert(owner, slots)
            # Slots of no unit are one past the end or more.
            return total.at[units].set(gathered, mode="drop")

        total = as_varying(jnp.zeros(shape, totals.dtype), others)
        sent = float((self.layout.ranks - 1) * runs * run * self.plan.unit_bytes)
        return lax.fori_loop(0, runs, turn, total), sent

    def at_units(self, totals: jax.Array) -> jax.Array:
        """The sums of this owner at their units, zeros elsewhere."""
        slots = lax.iota(jnp.int32, self.layout.width)
        units = self.layout.invert(self.wire.rank, slots)
        shape = (self.layout.size, *totals.shape[1:])
        zeros = as_varying(jnp.zeros(shape, totals.dtype), varying_axes(totals))
        return zeros.at[units].set(totals, mode="drop")


def nonzero_units(total: jax.Array) -> jax.Array:
    """How many units of a total are non-zero, as after an all-reduce: float32."""
    return bits.count(bits.nonzero_units(total)).astype(jnp.float32)


# From this owner's sums to the total, what was sent and how many units are non-zero.
Sender = Callable[[jax.Array], tuple[jax.Array, base.Stage, jax.Array]]


class Fallback(NamedTuple):
    """What all ranks do instead of a pull, where nothing was pushed.

    Attributes:
        wanted: Whether they do, equal on all ranks.
        send: Makes of an operand the total, what was sent, and how many units there are.
        operand: What it is called with.
        dtype: Of the total.
    """

    wanted: jax.Array
    send: Callable[[Any], tuple[jax.Array, base.Stage, jax.Array]]
    operand: Any
    dtype: jnp.dtype


class Pull(abc.ABC):
    """A way in which sums come back. A frozen dataclass."""

    @abc.abstractmethod
    def __call__(self, owned: Owned, totals: jax.Array) -> Pulled:
        """Gives all ranks the sums.

        Args:
            owned: What is fixed when traced.
            totals: [width, ...], this owner's sums by slot, in the dtype of the wire.
        """

    @abc.abstractmethod
    def forecast(self, plan: OwnerPlan, load: Load, fullest: int) -> _PullForecast:
        """The bytes that one rank would send, the messages, and the rounds.

        Args:
            plan: The message sizes, and what is sent.
            load: What there is to add up.
            fullest: Entries of the owner that has most.
        """


class PullEntries(Pull):
    """A way in which sums come back as entries, or whole where that takes no more bytes."""

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
            owned.wire,
            entry_bytes < owned.plan.whole_bytes,
            by_entries,
            owned.whole,
            totals,
            # Gathered sums stay as they are; added up, they do not.
            copied=not owned.plan.has_even_parts,
        )
        return Pulled(total, stage, units, jnp.float32(agreed + cost))

    @abc.abstractmethod
    def by_entries(
        self, owned: Owned, totals: jax.Array, sets: Slots, fullest: jax.Array
    ) -> tuple[Sender, jax.Array, float]:
        """How the entries are sent, the bytes of that, and those of what it agreed on.

        Args:
            owned: What is fixed when traced.
            totals: [width, ...], this owner's sums by slot.
            sets: Which of them are not zero.
            fullest: How many the owner with most has.
        """

    @abc.abstractmethod
    def of_entries(
        self, plan: OwnerPlan, load: Load, fullest: int
    ) -> tuple[float, _PullForecast]:
        """The bytes by which entries are chosen, and what is sent then; see `forecast`."""

    def forecast(self, plan, load, fullest):
        entry_bytes, sent = self.of_entries(plan, load, fullest)
        return sent if entry_bytes < plan.whole_bytes else whole(plan)


@dataclasses.dataclass(frozen=True)
class Gather(PullEntries):
    """Each owner's entries to all ranks, in one message."""

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
    """Each owner's sums to all ranks, zeros and all."""

    def __call__(self, owned, totals):
        return Pulled(*owned.whole(totals), jnp.float32(0))

    def forecast(self, plan, load, fullest):
        return whole(plan)


def whole(plan: OwnerPlan) -> _PullForecast:
    """Bytes, messages and rounds where all sums come back, zeros and all."""
    return plan.whole_bytes, agreeing(plan.ranks) + plan.ranks - 1, 1
