"""The sizes of messages that one program unpacks, and the ways to unpack them.

Of small arrays, and in kernels, it is one for all sizes. Of large arrays in plain XLA a way
that is fast for short messages is slow for long ones, so there are several groups.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels.operations.messages import unpack_message
from pallas_kernels.platforms import policy
from pallas_kernels.reference.index_message import word_ranks
from pallas_kernels.reference.layout import Run
from pallas_kernels.reference.messages import read_message
from pallas_kernels.reference.specs import Received, Unpacking
from sparsejax.units import bits
from sparsejax.wire import index_codes
from sparsejax.wire.at_once.rows import RowMessages
from sparsejax.wire.at_once.unpacking import Head, Into, goes_in_order, spec_of, unpack
from sparsejax.wire.formats import Form
from sparsejax.wire.ordered import MOST_SENDERS


# The units of an array that fits the caches: a scatter into it takes less time than a
# branch for which the host waits.
_FEW_UNITS = 1 << 22
# The most numbers of an ordered sum of rows that is made in the order of the array, which
# takes a pass over it for each sender.
_FEW_NUMBERS = 1 << 25
# The share of the slots of a part up to which messages are in the group of the smaller of
# two capacities.
_SHORT = 1 / 128


def goes_by_rows(form: Form, fold: Any, senders: int) -> bool:
    """Returns whether each row of the array can look up its entries: one, or one a sender.

    For an ordered sum the table has a number for each sender, which must be no more than
    the numbers of a row. Each number of the array is looked up for each sender, which takes
    as long as a launch if there are 2**25 of them. All senders are in one kernel, so more
    than `MOST_SENDERS` would take long to compile.
    """
    into: Into | None = fold.into
    if into is None or not form.shape:
        return False
    if into.replaces:
        return True
    are_few = senders <= min(math.prod(form.shape), MOST_SENDERS)
    return fold.in_order and are_few and fold.start.size <= _FEW_NUMBERS


class SizeGroup(NamedTuple):
    """Message sizes that are unpacked by the same program.

    Attributes:
        sides: The sides (`Lengths.side`) of the group: nothing, rungs, or several messages.
        room: The words of the longest message of the group.
        unpack: A function of the arguments of `unpack` after the form, which returns the
            result.
    """

    sides: range
    room: int
    unpack: Callable[..., Any]

    @classmethod
    def of(cls, sides: range, form: Form, unpack: Callable[..., Any]) -> "SizeGroup":
        """Returns the group of a form, which a function like `unpack` unpacks."""
        return cls(sides, form.room, functools.partial(unpack, form))


def groups(form: Form, fold: Any, senders: int) -> list[SizeGroup]:
    """Returns the groups of all sizes, ascending, from nothing to several messages.

    There is one group, except for large arrays in plain XLA on GPUs. There unpacking takes
    as long as if messages were full, and a scatter writes each number to a memory sector of
    its own. If a word of bits has one entry on average, nearly all sectors have one, so
    denser messages are unpacked in the order of the array. Sparser ones have two groups, of
    different capacities.

    Of rows each long message has a group of its own, which reads it from the buffer that
    received it. To copy it to a buffer for all sizes, and to scatter its rows into zeros,
    takes as long as to read it four times.

    Args:
        form: The offsets of the parts of a message.
        fold: The fold of the entries.
        senders: The number of messages received.
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
        # The first group also has the side that sends nothing.
        sides = range(stop, stop + len(steps.rungs) + (not found))
        stop = sides.stop
        if unpacks is unpack_rows:
            number = stop - 2
            of_rung = functools.partial(unpack_rows, number, form)
            found.append(SizeGroup(sides, ladder.rungs[number].words, of_rung))
        else:
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
    """Unpacks messages of rows of one size, the only ones, from the buffer received.

    Args:
        number: The number of the rung.
        form: The offsets of the parts of a message.
        message: uint32 [senders, words of the rung].
        numbers: int32 [numbers], as returned by `run_of`.
        fold: The fold of the entries.
        carry: The start of the fold, all zeros.
        at: The index in `numbers` of the first number to read.
    """
    spec, begin = spec_of(form, fold, at), int(form.begins[number])
    rows = RowMessages(message, numbers, spec, form.prefix, begin)
    return rows.written(carry) if fold.into.replaces else rows.summed(carry)


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
    marks = bits.bitmaps_of(slots, is_there, spec.longest)
    received, how = Received(message, word_ranks(marks)), Unpacking(fold.into.replaces)
    return unpack_message(carry, received, numbers, spec, how)


def unpack_next_in_order(
    form: Form, message: jax.Array, numbers: jax.Array, fold: Any, carry: Any, at: int = 0
) -> Any:
    """Does as `unpack_lists_in_order`, for messages that may follow others."""
    # No two messages have a value for the same unit.
    return carry + unpack_lists_in_order(form, message, numbers, fold, carry, at)
