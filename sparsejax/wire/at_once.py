"""Packs and unpacks messages of all parts at once, on GPUs and all platforms except CPUs.

`messages` describes the format. There is no loop over entries: as many entries as the
longest message holds are processed for every part, and those that are not real are masked.
A GPU writes a few megabytes of padding in less time than the host needs to decide whether a
loop continues; and kernels do not write the padding: see `pallas_kernels.pack_message`.

A message is unpacked by `pallas_kernels.unpack_message` if the fold has a form that kernels
know (`Into`); otherwise its entries are read and passed to the fold. If a message is sent
in pieces (`unpack_piece`), the first piece has its slots (`Head`), and each other piece has
the values of some entries.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.operations.messages import (
    index_message,
    pack_message,
    unpack_message,
    unpacks_in_kernels,
)
from pallas_kernels.platforms import policy
from pallas_kernels.reference.bitmap import bitmaps_of
from pallas_kernels.reference.index_message import word_ranks
from pallas_kernels.reference.messages import Run, read_message, row_ends
from pallas_kernels.reference.slots import slots_of
from pallas_kernels.reference.specs import MessageSpec, Received, SlotSets, Unpacking
from pallas_kernels.striping import Striping
from sparsejax.units import bits
from sparsejax.units.bits import Slots
from sparsejax.units.units import Source
from sparsejax.wire import index_codes
from sparsejax.wire.formats import Form, Piece
from sparsejax.wire.ladder import Rung


# The units of an array that fits the caches: a scatter into it takes less time than a
# branch for which the host waits.
_FEW_UNITS = 1 << 22
# The share of the slots of a part up to which messages are in the group of the smaller of
# two capacities.
_SHORT = 1 / 128


class Into(NamedTuple):
    """A fold into one array, in a form that kernels know.

    Attributes:
        replaces: Whether values replace zeros, no two of them at one place; if not, they
            are added.
        units: A function of the number of the sender and slots that returns places in the
            array. If None, slots are places. Entries with places past the end are dropped.
    """

    replaces: bool = False
    units: Any = None

    @property
    def is_known(self) -> bool:
        """Whether kernels can compute `units`."""
        return self.units is None or isinstance(self.units, Striping)


def run_of(first: Any, length: Any, row: jax.Array) -> jax.Array:
    """Returns the numbers of a message, as one array: see `pallas_kernels.pack_message`."""
    numbers = [jnp.asarray(number, jnp.int32) for number in (first, length)]
    return jnp.concatenate([jnp.stack(numbers), row])


def ends_of(slots: Slots) -> jax.Array:
    """Returns the bits up to the end of each row of words, for messages of all sizes."""
    return row_ends(slots.words)


def pack(
    spec: MessageSpec,
    slots: Slots,
    source: Source,
    numbers: jax.Array,
    ends: jax.Array | None = None,
) -> jax.Array:
    """Packs consecutive entries of each part into a message of its own.

    Args:
        spec: The static properties of the messages, without the source's map to units.
        slots: The slots of each part.
        source: The values of the slots.
        numbers: int32 [numbers], as returned by `run_of`.
        ends: The result of `ends_of`, if it is known.
    """
    sets, units = SlotSets(slots.words, slots.counts, ends=ends), source.units
    if source.names is None and (units is None or isinstance(units, Striping)):
        spec = dataclasses.replace(spec, units=units)
    else:
        # Kernels do not know these maps, so slots and units are listed before.
        part = lax.broadcasted_iota(jnp.int32, (len(slots.counts), 1), 0)
        first = lax.index_in_dim(numbers, spec.at, keepdims=False)
        found, _ = slots_of(slots.words, first, spec.room, slots.counts)
        names = found if source.names is None else source.names(part, found)
        units = found if units is None else units(part, found)
        sets = SlotSets(names, slots.counts, units)
    return pack_message(sets, source.array, numbers, spec)


def in_branches(form: Form, sources: int, fold: Any) -> bool:
    """Returns whether each size's branch unpacks its messages, by one kernel for all.

    In plain XLA the unpacking of each size would be compiled separately.

    Args:
        form: The offsets of the parts of a message.
        sources: The number of messages received.
        fold: The fold of the entries.
    """
    if fold.into is None or not fold.into.is_known:
        return False
    numbers = sources * form.ladder.top * math.prod(form.shape)
    return unpacks_in_kernels(fold.start.dtype, form.dtype, numbers)


class Head(NamedTuple):
    """The first pieces of received messages, with their headers and bit counts.

    Attributes:
        words: uint32 [senders, words], the pieces.
        counts: int32 [senders], the number of entries of each part in all.
        ends: The bit counts: see `pallas_kernels.index_message`.
        spec: The static properties of the messages.
    """

    words: jax.Array
    counts: jax.Array
    ends: jax.Array
    spec: MessageSpec

    @classmethod
    def of(cls, words: jax.Array, numbers: jax.Array, spec: MessageSpec) -> "Head":
        """Reads the headers of the pieces, and counts their bits."""
        return cls(words, *index_message(words, numbers, spec), spec)


def spec_of(form: Form, fold: Any, at: int, bitmaps: bool = False) -> MessageSpec:
    """Returns the static properties of messages that a fold takes in.

    Args:
        form: The offsets of the parts of a message.
        fold: The fold of the entries.
        at: The offset in `numbers` of the numbers of these messages.
        bitmaps: Whether the messages are unpacked in the order of the array.
    """
    spec = dataclasses.replace(form.spec, units=fold.into.units, at=at)
    if not bitmaps:
        return spec
    longest = form.ladder.width // bits.WORD
    return dataclasses.replace(spec, longest=longest, bitmaps=True)


def are_bitmaps(form: Form, rung: Rung, fold: Any) -> bool:
    """Returns whether the only messages, of a rung, are unpacked in the array's order."""
    return goes_in_order(form, fold) and rung.code is index_codes.BITMAP


def goes_in_order(form: Form, fold: Any) -> bool:
    """Returns whether each unit of the array can look up its own value.

    That is for numbers only: for rows, a scatter is better, where most rows stay zero.
    """
    into: Into | None = fold.into
    is_striped = into is not None and into.replaces and isinstance(into.units, Striping)
    return is_striped and not form.shape


class SizeGroup(NamedTuple):
    """Message sizes that are unpacked by the same program.

    Attributes:
        sides: The sides (`Lengths.side`) of the group: nothing, rungs, or several messages.
        form: The offsets of the parts of a message, with the capacity of the longest of the
            group.
        unpack: A function of `form` and the further arguments of `unpack`, which returns
            the result.
    """

    sides: range
    form: Form
    unpack: Callable[..., Any]


def groups(form: Form, fold: Any) -> list[SizeGroup]:
    """Returns the groups of all sizes, ascending, from nothing to several messages.

    There is one group, except for many numbers in plain XLA on GPUs. There unpacking takes
    as long as if messages were full, and a scatter writes each entry to a memory sector of
    its own. If a word of bits has one entry on average, nearly all sectors have one, so
    denser messages are unpacked in the order of the array. Sparser ones have two groups, of
    different capacities.
    """
    ladder, in_order = form.ladder, policy().scatters and goes_in_order(form, fold)
    if not in_order or fold.into.units.size <= _FEW_UNITS:
        return [SizeGroup(range(len(ladder.rungs) + 2), form, unpack)]

    def way(rung):
        if rung.code is index_codes.BITMAP:
            return unpack_bitmaps, 0
        filled = rung.capacity / ladder.width
        unpacks = unpack if filled <= 1 / bits.WORD else unpack_lists_in_order
        return unpacks, int(filled > _SHORT)

    found, stop = [], 0
    for (unpacks, _), rungs in itertools.groupby(ladder.rungs, way):
        steps = dataclasses.replace(ladder, rungs=tuple(rungs))
        of_group = Form(steps, form.shape, form.dtype, form.rows)
        # The first group also has the side that sends nothing.
        sides = range(stop, stop + len(steps.rungs) + (not found))
        found.append(SizeGroup(sides, of_group, unpacks))
        stop = sides.stop
    return [*found, SizeGroup(range(stop, stop + 1), form, unpack_next_in_order)]


def unpack_bitmaps(
    form: Form, message: jax.Array, numbers: jax.Array, fold: Any, carry: Any, at: int
) -> Any:
    """Does as `unpack`, for messages with bitmaps that are the only ones of a stage."""
    head = Head.of(message, numbers, spec_of(form, fold, at, bitmaps=True))
    how = Unpacking(fold.into.replaces)
    return unpack_message(carry, Received(message, head.ends), numbers, head.spec, how)


def unpack_lists_in_order(
    form: Form, message: jax.Array, numbers: jax.Array, fold: Any, carry: Any, at: int
) -> Any:
    """Does as `unpack`, for the only messages of a stage, from bitmaps that it makes."""
    spec = spec_of(form, fold, at, bitmaps=True)
    run = Run.of(numbers, spec)
    slots, _, is_there = read_message(message, run, form.spec, form.shape)
    marks = bitmaps_of(slots, is_there, spec.longest)
    received, how = Received(message, word_ranks(marks)), Unpacking(fold.into.replaces)
    return unpack_message(carry, received, numbers, spec, how)


def unpack_next_in_order(
    form: Form, message: jax.Array, numbers: jax.Array, fold: Any, carry: Any, at: int = 0
) -> Any:
    """Does as `unpack_lists_in_order`, for messages that may follow others."""
    # No two messages have a value for the same unit.
    return carry + unpack_lists_in_order(form, message, numbers, fold, carry, at)


def unpack_piece(
    piece: Piece, head: Head, words: jax.Array, numbers: jax.Array, fold: Any, carry: Any
) -> Any:
    """Folds the entries of a piece of the messages received.

    Args:
        piece: The words and entries of this piece.
        head: The first pieces of the messages.
        words: uint32 [senders, words], this piece of each message.
        numbers: int32 [numbers], as returned by `run_of`.
        fold: The fold of the entries.
        carry: The result so far.
    """
    if piece.first == piece.last:
        return carry
    received = Received(head.words, head.ends, None if words is head.words else words)
    how = Unpacking(fold.into.replaces, fold.in_order, piece.first, piece.last)
    return unpack_message(carry, received, numbers, head.spec, how)


def unpack(
    form: Form, message: jax.Array, numbers: jax.Array, fold: Any, carry: Any, at: int = 0
) -> Any:
    """Folds the entries of the messages received.

    Args:
        form: The offsets of the parts of a message.
        message: uint32 [senders, words], the messages.
        numbers: int32 [numbers], as returned by `run_of`.
        fold: The fold of the entries.
        carry: The result so far.
        at: The offset in `numbers` of the numbers of these messages.
    """
    if fold.into is not None and fold.into.is_known:
        how = Unpacking(fold.into.replaces, fold.in_order)
        spec = spec_of(form, fold, at)
        return unpack_message(carry, Received(message), numbers, spec, how)
    spec = dataclasses.replace(form.spec, at=at)
    run = Run.of(numbers, spec)
    slots, values, is_there = read_message(message, run, spec, form.shape)
    slots = jnp.where(is_there, slots, form.ladder.width)
    if not fold.in_order:
        sender = lax.broadcasted_iota(jnp.int32, slots.shape, 0).reshape(-1)
        values = values.reshape(-1, *form.shape)
        return fold.add(carry, sender, slots.reshape(-1), values)
    turn = lambda sender, carry: fold.add(carry, sender, slots[sender], values[sender])
    return lax.fori_loop(0, len(message), turn, carry)
