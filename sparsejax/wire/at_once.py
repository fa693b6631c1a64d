"""Messages packed and unpacked whole, all parts at once: for GPUs, and all but CPUs.

What is in a message is said in `messages`. Here there is no loop: every part is taken to
have as many entries as the longest message holds, and those that are not there are left
out. A GPU writes a few megabytes for nothing in less time than it takes to ask the host
whether a loop goes on; a kernel does not even do that: see `pallas_kernels.pack_message`.

A message is unpacked by `pallas_kernels.unpack_message` where the fold says what it does in
a form that kernels know (`Into`); else its entries are read and given to the fold. Where it
comes in pieces (`unpack_piece`), the first says which slots there are (`Head`), and each
other brings the values of some entries.
"""

import dataclasses
import functools
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
from pallas_kernels.reference.layout import Prefix, Run
from pallas_kernels.reference.messages import read_message, row_ends
from pallas_kernels.reference.rows import set_rows, sum_of_rows
from pallas_kernels.reference.slots import slots_of
from pallas_kernels.reference.specs import MessageSpec, Received, SlotSets, Unpacking
from pallas_kernels.striping import Striping
from sparsejax.units import bits
from sparsejax.units.bits import Slots
from sparsejax.units.units import Source
from sparsejax.wire import index_codes
from sparsejax.wire.formats import Form, Piece
from sparsejax.wire.ladder import Rung


# Units of an array that caches hold: a scatter into it costs less than to ask the host.
_FEW_UNITS = 1 << 22
# Numbers for which an ordered sum of rows goes over the whole array for each sender.
_FEW_NUMBERS = 1 << 25
# The share of slots up to which a list of them has the smaller of two rooms.
_SHORT = 1 / 128


class Into(NamedTuple):
    """A fold into one array, in a form that kernels know.

    Attributes:
        replaces: Whether values are set where there were zeros, no two of them at one
            place; else they are added.
        units: From the number of the sender and slots to places in the array; the slots
            themselves if None. Nothing is done at places after its end.
    """

    replaces: bool = False
    units: Any = None

    @property
    def is_known(self) -> bool:
        """Whether kernels know the map too."""
        return self.units is None or isinstance(self.units, Striping)


def run_of(first: Any, length: Any, row: jax.Array) -> jax.Array:
    """Returns the numbers of a message, as one array: see `pallas_kernels.pack_message`."""
    numbers = [jnp.asarray(number, jnp.int32) for number in (first, length)]
    return jnp.concatenate([jnp.stack(numbers), row])


def ends_of(slots: Slots) -> jax.Array:
    """The bits up to the end of each row of words: one search for messages of all sizes."""
    return row_ends(slots.words)


def pack(
    spec: MessageSpec,
    slots: Slots,
    source: Source,
    numbers: jax.Array,
    ends: jax.Array | None = None,
) -> jax.Array:
    """Writes a run of ranks of each part into a message of its own.

    Args:
        spec: What is static of messages; the map from slots to units is the source's.
        slots: The slots of each part.
        source: Their values.
        numbers: As of `run_of`.
        ends: Of `ends_of`, where they are known.
    """
    spec = _spec_of(spec, source)
    sets = _sets_of(spec, slots, source, numbers, ends)
    return pack_message(sets, source.array, numbers, spec)


def prefix(
    spec: MessageSpec, slots: Slots, source: Source, numbers: jax.Array, words: int
) -> Prefix:
    """What `pack` writes but for values, in the first words of messages."""
    spec = _spec_of(spec, source)
    return Prefix.of(_sets_of(spec, slots, source, numbers), numbers, spec, words)


def with_values(
    spec: MessageSpec, start: Prefix, source: Source, begin: int, room: int
) -> jax.Array:
    """The messages of one size that begin as `prefix` says: uint32 [parts, words].

    Values begin at the word `begin`, and there is room for `room` of them.
    """
    values = start.values(source.array, _spec_of(spec, source), room)
    return jnp.concatenate([start.message[:, :begin], values], axis=1)


def _spec_of(spec, source):
    """The spec with the map from slots to units, where kernels know it."""
    units = source.units
    knows = source.names is None and (units is None or isinstance(units, Striping))
    return dataclasses.replace(spec, units=units) if knows else spec


def _sets_of(spec, slots, source, numbers, ends=None):
    """The slots; listed, with their units, where kernels do not know the map to those."""
    units = source.units
    if source.names is None and (units is None or spec.units is units):
        return SlotSets(slots.words, slots.counts, ends=ends)
    part = lax.broadcasted_iota(jnp.int32, (len(slots.counts), 1), 0)
    first = lax.index_in_dim(numbers, spec.at, keepdims=False)
    found, _ = slots_of(slots.words, first, spec.room, slots.counts)
    names = found if source.names is None else source.names(part, found)
    units = found if units is None else units(part, found)
    return SlotSets(names, slots.counts, units)


def in_branches(form: Form, sources: int, fold: Any) -> bool:
    """Whether messages are unpacked where they are received: by one kernel for all sizes.

    In plain XLA each size would be compiled by itself.

    Args:
        form: Where the parts of a message are.
        sources: How many messages are received.
        fold: What is made of the entries.
    """
    if fold.into is None or not fold.into.is_known:
        return False
    numbers = sources * form.ladder.top * math.prod(form.shape)
    return unpacks_in_kernels(fold.start.dtype, form.dtype, numbers)


class Head(NamedTuple):
    """The first pieces of messages that were received, and what is looked up in them.

    Attributes:
        words: uint32 [senders, words].
        counts: int32 [senders], how many entries each part has in all.
        ends: See `pallas_kernels.index_message`.
        spec: What is static of the messages.
    """

    words: jax.Array
    counts: jax.Array
    ends: jax.Array
    spec: MessageSpec

    @classmethod
    def of(cls, words: jax.Array, numbers: jax.Array, spec: MessageSpec) -> "Head":
        """Looks it up."""
        return cls(words, *index_message(words, numbers, spec), spec)


def spec_of(form: Form, fold: Any, at: int, bitmaps: bool = False) -> MessageSpec:
    """Returns the static properties of messages that a fold takes in.

    Args:
        form: Where the parts of a message are.
        fold: What is made of the entries.
        at: Which of the numbers is the first that is meant.
        bitmaps: Whether the messages are unpacked in the order of the array.
    """
    spec = dataclasses.replace(form.spec, units=fold.into.units, at=at)
    if not bitmaps:
        return spec
    longest = form.ladder.width // bits.WORD
    return dataclasses.replace(spec, longest=longest, bitmaps=True)


def are_bitmaps(form: Form, rung: Rung, fold: Any) -> bool:
    """Whether messages of a rung, if no others come, are unpacked in the array's order."""
    return goes_in_order(form, fold) and rung.code is index_codes.BITMAP


def goes_in_order(form: Form, fold: Any) -> bool:
    """Whether each unit of the array can look up its own value.

    Of numbers alone: of rows, it pays where most lines of the array stay zero.
    """
    into: Into | None = fold.into
    is_striped = into is not None and into.replaces and isinstance(into.units, Striping)
    return is_striped and not form.shape


def goes_by_rows(form: Form, fold: Any, senders: int) -> bool:
    """Whether each row of the array can look up its own entries: one, or one a sender.

    Of an ordered sum a row of the table has a number for each sender, and is no longer than
    a row of the array. Each number of the array is looked up for each sender, which takes
    as long as a launch if there are 2**25 of them.
    """
    into: Into | None = fold.into
    if into is None or not form.shape or into.replaces:
        return into is not None and bool(form.shape)
    is_wide = math.prod(form.shape) >= senders
    return fold.in_order and is_wide and fold.start.size <= _FEW_NUMBERS


class SizeGroup(NamedTuple):
    """Sizes of messages for which there is one program that unpacks them.

    Attributes:
        sides: Which of `Lengths.side`: nothing, one message of a rung, or several.
        room: Words of a message that it unpacks: as many as the longest of the group needs.
        unpack: From what `unpack` takes after the form to the result.
    """

    sides: range
    room: int
    unpack: Callable[..., Any]

    @classmethod
    def of(cls, sides: range, form: Form, unpack: Callable[..., Any]) -> "SizeGroup":
        """Those of a form, unpacked by `unpack` or what takes the same."""
        return cls(sides, form.room, functools.partial(unpack, form))


def groups(form: Form, fold: Any, senders: int) -> list[SizeGroup]:
    """The groups of all sizes, ascending, from nothing to several messages.

    It is one, except for many numbers in plain XLA on GPUs, where unpacking takes as long
    as if messages were full, and a scatter writes each entry to a sector of memory of its
    own. Where a word of bits has an entry on average, nearly all sectors have one: so a
    message that is denser is unpacked in the order of the array. Others have two rooms.

    Of rows each long message has a program of its own, which reads it where it is received:
    to copy it to a room for all, and its rows to zeros, takes as long as to read it four
    times.

    Args:
        form: Where the parts of a message are.
        fold: What is made of the entries.
        senders: How many messages are received.
    """
    ladder, in_order = form.ladder, goes_in_order(form, fold)
    divides = policy().scatters and (in_order or goes_by_rows(form, fold, senders))
    if not divides or fold.start.size <= _FEW_UNITS:
        return [SizeGroup.of(range(len(ladder.rungs) + 2), form, unpack)]

    def way(rung):
        filled = rung.capacity / ladder.width
        if not in_order:
            is_long = ladder.is_long(rung)
            return (unpack_rows, rung.capacity) if is_long else (unpack, 0)
        if rung.code is index_codes.BITMAP:
            return unpack_bitmaps, 0
        unpacks = unpack if filled <= 1 / bits.WORD else unpack_lists_in_order
        return unpacks, int(filled > _SHORT)

    found, stop = [], 0
    for (unpacks, _), rungs in itertools.groupby(ladder.rungs, way):
        steps = dataclasses.replace(ladder, rungs=tuple(rungs))
        # Where nothing is sent, the first unpacks that.
        sides = range(stop, stop + len(steps.rungs) + (not found))
        stop = sides.stop
        if unpacks is unpack_rows:
            number = stop - 2
            words, unpacks = ladder.rungs[number].words, functools.partial(unpacks, number)
            found.append(SizeGroup(sides, words, functools.partial(unpacks, form)))
            continue
        of_group = Form(steps, form.shape, form.dtype, form.rows)
        found.append(SizeGroup.of(sides, of_group, unpacks))
    last = unpack_next_in_order if in_order else unpack
    return [*found, SizeGroup.of(range(stop, stop + 1), form, last)]


def unpack_rows(
    number: int,
    form: Form,
    message: jax.Array,
    numbers: jax.Array,
    fold: Any,
    carry: Any,
    at: int,
) -> Any:
    """`unpack`, of messages of rows of one size that are the only ones: read as received.

    Args:
        number: The rung.
        form: Where the parts of a message are.
        message: uint32 [senders, words of the rung].
        numbers: As of `run_of`.
        fold: What is made of the entries.
        carry: The result so far, in which there is nothing.
        at: Which of the numbers is the first that is meant.
    """
    unpacks = set_rows if fold.into.replaces else sum_of_rows
    spec, begin = spec_of(form, fold, at), int(form.begins[number])
    return unpacks(carry, message, numbers, spec, form.prefix, begin)


def unpack_bitmaps(
    form: Form, message: jax.Array, numbers: jax.Array, fold: Any, carry: Any, at: int
) -> Any:
    """`unpack`, of messages that have bitmaps, and are the only ones."""
    head = Head.of(message, numbers, spec_of(form, fold, at, bitmaps=True))
    how = Unpacking(fold.into.replaces)
    return unpack_message(carry, Received(message, head.ends), numbers, head.spec, how)


def unpack_lists_in_order(
    form: Form, message: jax.Array, numbers: jax.Array, fold: Any, carry: Any, at: int
) -> Any:
    """`unpack`, of messages that are the only ones: their bitmaps are made here."""
    spec = spec_of(form, fold, at, bitmaps=True)
    run = Run.of(numbers, spec)
    slots, _, is_there = read_message(message, run, form.spec, form.shape)
    marks = bitmaps_of(slots, is_there, spec.longest)
    received, how = Received(message, word_ranks(marks)), Unpacking(fold.into.replaces)
    return unpack_message(carry, received, numbers, spec, how)


def unpack_next_in_order(
    form: Form, message: jax.Array, numbers: jax.Array, fold: Any, carry: Any, at: int = 0
) -> Any:
    """`unpack`, of messages that may follow others."""
    # No two have a value for one unit.
    return carry + unpack_lists_in_order(form, message, numbers, fold, carry, at)


def unpack_piece(
    piece: Piece, head: Head, words: jax.Array, numbers: jax.Array, fold: Any, carry: Any
) -> Any:
    """Folds the entries of a piece of the messages received.

    Args:
        piece: Which.
        head: The first.
        words: uint32 [senders, words], this one.
        numbers: As of `run_of`.
        fold: What is made of the entries.
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
        form: Where the parts of a message are.
        message: uint32 [senders, words].
        numbers: As of `run_of`.
        fold: What is made of the entries.
        carry: The result so far.
        at: Which of the numbers is the first that is meant.
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
