"""Messages in Triton: one launch that writes them, and one that reads and adds them up.

A program has a run of entries of one part, or of one sender: as many as make their values
`_NUMBERS` numbers, or a few rows of them where rows are longer. After the last entry it
leaves at once. It goes over its entries once, a thread an entry or a few, for string and
lanes, and then over their values, column by column where they are rows.

Where the bits of its entries are it finds by their ranks, in a set's bits or a message's
string: the row of words by halving, among counts that XLA has added up before the launch,
then the word and the bit. No list of all entries is written and read again.

The bits of a string ascend with the entries, so all that are in one word are a run of
neighbours. Sums of marks from the program's first entry on, modulo 2^32, give a word as the
sum at the last of its run less the sum before the first: two atomic additions a word and
program. A launch before has cleared the messages: not where values will be, nor after.

What one sender sends is added without atomics: no two of its entries have one unit. So an
ordered sum (`reference.ordered`) is a launch a sender, others are one launch of atomics.
"""

import math

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jax import lax

from pallas_kernels.reference.messages import row_ends, row_words
from pallas_kernels.triton.index_message import index_message as index_message
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.slots import (
    KINDS,
    entries_here,
    find_bits,
    seeds_of,
    striped,
    striped_unit,
    values_at,
)


_NUMBERS = 1024  # of the values of a program's entries at a time
_COLUMNS = 256  # and of one entry, at most
_WARPS = 8
_CLEARED = 4096  # words that a program clears


def pack_message(
    slots,
    counts,
    numbers,
    array,
    *given,
    room,
    words,
    planes,
    dtype,
    units,
    at,
    end=None,
    searched=False,
):
    """See `pallas_kernels.pack_message`."""
    listed = slots.dtype == jnp.int32
    width = math.prod(array.shape[1:])
    block, columns = _sizes(width)
    row, ends = (1, slots) if listed else (row_words(slots.shape[1]), None)
    if searched:
        ends, *given = given
    if ends is None:
        ends, _ = row_ends(slots)
    # Data, so that one kernel is compiled for messages of all sizes.
    end = words if end is None else end
    stride = jnp.array([end], jnp.int32)
    cleared = _cleared(counts, numbers, stride, end, room, width, dtype, at)
    (message,) = launch(
        pack_message_kernel,
        len(slots) * triton.cdiv(room, block),
        (
            slots,
            ends,
            counts,
            numbers,
            array.reshape(-1),
            given[0] if given else counts,
            seeds_of(units),
            stride,
        ),
        in_place=(cleared,),
        warps=_WARPS,
        LISTED=int(listed),
        BITS=slots.shape[1],
        ROWS=ends.shape[1],
        HALVINGS=ends.shape[1].bit_length(),
        ROW=row,
        ROOM=room,
        SIZE=len(array),
        WIDTH=width,
        PLANES=planes,
        KIND=KINDS[dtype],
        GIVEN=len(given),
        **striped(units),
        AT=at,
        BLOCK=block,
        COLUMNS=columns,
    )
    return lax.bitcast_convert_type(message, jnp.uint32)


def unpack_message(
    into,
    message,
    numbers,
    *cut,
    room,
    longest,
    planes,
    dtype,
    replaces,
    units,
    at,
    first=0,
    last=None,
    ordered=False,
):
    """See `pallas_kernels.unpack_message`."""
    width = math.prod(into.shape[1:])
    block, columns = _sizes(width)
    last = room if last is None else last
    sizes = {"longest": longest, "planes": planes, "at": at}
    ends = cut[0] if cut else index_message(message, numbers, **sizes)[1]
    values = cut[1] if len(cut) > 1 else message
    # Data, so that one kernel is compiled for messages of all sizes, and for all senders.
    told = [message.shape[1], values.shape[1], first, last, int(len(cut) > 1)]
    each, sums = 1 if ordered and not replaces else len(message), into.reshape(-1)
    for sender in range(0, len(message), each):
        run = jnp.array([*told, sender, each], jnp.int32)
        (sums,) = launch(
            unpack_message_kernel,
            each * triton.cdiv(last - first, block),
            (message, values, ends, numbers, run, seeds_of(units)),
            in_place=(sums,),
            warps=_WARPS,
            BITS=longest,
            ROWS=ends.shape[1],
            HALVINGS=ends.shape[1].bit_length(),
            ROW=row_words(longest),
            ROOM=room,
            SIZE=len(into),
            WIDTH=width,
            UNIT=width * dtype.itemsize,
            PLANES=planes,
            KIND=KINDS[dtype],
            REPLACES=int(replaces),
            ALONE=int(each == 1),
            **striped(units),
            AT=at,
            BLOCK=block,
            COLUMNS=columns,
        )
    return sums.reshape(into.shape)


def _cleared(counts, numbers, stride, words, room, width, dtype, at):
    """Messages that are zero wherever no value will be; after them is anything."""
    (message,) = launch(
        clear_message_kernel,
        len(counts) * triton.cdiv(words, _CLEARED),
        (counts, numbers, stride),
        results=[jax.ShapeDtypeStruct((len(counts), words), jnp.int32)],
        warps=_WARPS,
        ROOM=room,
        UNIT=width * dtype.itemsize,
        AT=at,
        BLOCK=_CLEARED,
    )
    return message


def _sizes(width):
    """Entries of a program, and the columns of their values that it handles at a time."""
    columns = min(triton.next_power_of_2(width), _COLUMNS)
    return max(4, _NUMBERS // columns), columns


@triton.jit
def clear_message_kernel(
    counts_ptr,
    numbers_ptr,
    stride_ptr,
    message_ptr,
    ROOM: tl.constexpr,
    UNIT: tl.constexpr,
    AT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program clears a run of words of a message, but for those of its values."""
    stride = tl.load(stride_ptr)
    blocks = (stride + BLOCK - 1) // BLOCK
    part = tl.program_id(0) // blocks
    begin = tl.program_id(0) % blocks * BLOCK
    run = numbers_ptr + AT
    end = tl.load(run + 8)
    if begin >= end:
        return
    here = entries_here(tl.load(counts_ptr + part), run, ROOM)
    values = tl.load(run + 4)
    # A word that values fill by half is cleared, too; the bytes are more than int32.
    behind = values + tl.maximum(here, 0).to(tl.int64) * UNIT // 4
    word = begin + tl.arange(0, BLOCK)
    mask = (word < end) & ((word < values) | (word >= behind))
    own = message_ptr + part.to(tl.int64) * stride
    tl.store(own + word, tl.zeros_like(word), mask=mask)


@triton.jit
def pack_message_kernel(
    slots_ptr,
    ends_ptr,
    counts_ptr,
    numbers_ptr,
    array_ptr,
    units_ptr,
    seeds_ptr,
    stride_ptr,
    _message,
    message_ptr,
    LISTED: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    HALVINGS: tl.constexpr,
    ROW: tl.constexpr,
    ROOM: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PLANES: tl.constexpr,
    KIND: tl.constexpr,
    GIVEN: tl.constexpr,
    PARTS: tl.constexpr,
    TURNS: tl.constexpr,
    COLUMN: tl.constexpr,
    AT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program writes a run of entries of a part, and the first of them the header."""
    blocks: tl.constexpr = (ROOM + BLOCK - 1) // BLOCK
    part = tl.program_id(0) // blocks
    begin = tl.program_id(0) % blocks * BLOCK
    own = message_ptr + part.to(tl.int64) * tl.load(stride_ptr)
    run = numbers_ptr + AT
    count = tl.load(counts_ptr + part)
    tl.store(own, count, mask=begin == 0)
    here = entries_here(count, run, ROOM)
    if begin >= here:
        return
    number = tl.arange(0, BLOCK)
    rank = begin + number
    there = rank < here
    entry = part.to(tl.int64) * ROOM + rank
    if LISTED:
        slot = tl.load(slots_ptr + entry, mask=there, other=0)
    else:
        bits = slots_ptr + part.to(tl.int64) * BITS
        ends = ends_ptr + part.to(tl.int64) * ROWS
        slot = find_bits(bits, ends, tl.load(run) + rank, there, BITS, ROWS, HALVINGS, ROW)

    has_lanes = tl.load(run + 5)
    shift = tl.load(run + 7)
    if tl.load(run + 6) != 0:
        bit = (slot >> shift) + has_lanes * rank
        word = bit >> 5
        mark = (there.to(tl.uint32) << (bit & 31).to(tl.uint32)).to(tl.int32)
        # The interpreter adds up in 64 bits, and has to drop the upper ones.
        sums = tl.cumsum(mark, 0).to(tl.int64).to(tl.int32)
        before = tl.gather(word, tl.maximum(number - 1, 0), 0)
        behind = tl.gather(word, tl.minimum(number + 1, BLOCK - 1), 0)
        is_first = (number > 0) & (before != word)
        is_last = (rank + 1 == here) | (number + 1 == BLOCK) | (behind != word)
        string = own + tl.load(run + 2)
        tl.atomic_add(string + word, sums, mask=there & is_last, sem="relaxed")
        tl.atomic_add(string + word, mark - sums, mask=there & is_first, sem="relaxed")

    octets = own.to(tl.pointer_type(tl.uint8), bitcast=True)
    for plane in tl.static_range(PLANES):
        lane = octets + tl.load(run + 9 + 2 * plane).to(tl.int64) * 4
        sent = tl.load(run + 10 + 2 * plane) != 0
        low = (slot >> 8 * plane) & 255
        tl.store(lane + rank, low.to(tl.uint8), mask=there & sent)

    unit = slot
    if GIVEN:
        unit = tl.load(units_ptr + entry, mask=there, other=0)
    if PARTS:
        unit = striped_unit(part, slot, seeds_ptr, PARTS, TURNS, COLUMN)
    unit = tl.minimum(tl.maximum(unit, 0), SIZE - 1).to(tl.int64)
    values = values_at(own + tl.load(run + 4), KIND)
    if WIDTH == 1:
        value = tl.load(array_ptr + unit, mask=there, other=0)
        tl.store(values + rank, value.to(values.dtype.element_ty), mask=there)
    else:
        for column in range(0, WIDTH, COLUMNS):
            at = column + tl.arange(0, COLUMNS)[None, :]
            mask = there[:, None] & (at < WIDTH)
            value = tl.load(array_ptr + unit[:, None] * WIDTH + at, mask=mask, other=0)
            to = values + rank[:, None].to(tl.int64) * WIDTH + at
            tl.store(to, value.to(values.dtype.element_ty), mask=mask)


@triton.jit
def unpack_message_kernel(
    message_ptr,
    values_ptr,
    ends_ptr,
    numbers_ptr,
    told_ptr,
    seeds_ptr,
    _into,
    into_ptr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    HALVINGS: tl.constexpr,
    ROW: tl.constexpr,
    ROOM: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    PLANES: tl.constexpr,
    KIND: tl.constexpr,
    REPLACES: tl.constexpr,
    ALONE: tl.constexpr,
    PARTS: tl.constexpr,
    TURNS: tl.constexpr,
    COLUMN: tl.constexpr,
    AT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program adds, or sets, a run of entries of a sender; senders take turns."""
    first = tl.load(told_ptr + 2)
    last = tl.load(told_ptr + 3)
    senders = tl.load(told_ptr + 6)
    sender = tl.load(told_ptr + 5) + tl.program_id(0) % senders
    begin = first + tl.program_id(0) // senders * BLOCK
    own = message_ptr + sender.to(tl.int64) * tl.load(told_ptr)
    run = numbers_ptr + AT
    here = entries_here(tl.load(own).to(tl.int32, bitcast=True), run, ROOM)
    here = tl.minimum(here, last)
    if begin >= here:
        return
    rank = begin + tl.arange(0, BLOCK)
    there = rank < here
    slot = tl.zeros_like(rank)
    if tl.load(run + 6) != 0:
        ends = ends_ptr + sender.to(tl.int64) * ROWS
        bit = find_bits(own + 1, ends, rank, there, BITS, ROWS, HALVINGS, ROW)
        slot = (bit - tl.load(run + 5) * rank) << tl.load(run + 7)
    octets = own.to(tl.pointer_type(tl.uint8), bitcast=True)
    for plane in tl.static_range(PLANES):
        lane = octets + tl.load(run + 9 + 2 * plane).to(tl.int64) * 4
        sent = tl.load(run + 10 + 2 * plane) != 0
        low = tl.load(lane + rank, mask=there & sent, other=0)
        slot = slot | (low.to(tl.int32) << 8 * plane)

    unit = slot
    if PARTS:
        unit = striped_unit(sender, slot, seeds_ptr, PARTS, TURNS, COLUMN)
    there = there & (unit >= 0) & (unit < SIZE)
    unit = unit.to(tl.int64)
    # Values alone begin with that of the first entry.
    behind = values_ptr + sender.to(tl.int64) * tl.load(told_ptr + 1)
    begins = tl.load(run + 4).to(tl.int64)
    if tl.load(told_ptr + 4) != 0:
        begins = -(first.to(tl.int64) // 4 * UNIT)
    values = values_at(behind + begins, KIND)
    kind: tl.constexpr = into_ptr.dtype.element_ty
    if WIDTH == 1:
        value = tl.load(values + rank, mask=there, other=0).to(kind)
        if REPLACES:
            tl.store(into_ptr + unit, value, mask=there)
        elif ALONE:
            held = tl.load(into_ptr + unit, mask=there, other=0)
            tl.store(into_ptr + unit, held + value, mask=there)
        else:
            tl.atomic_add(into_ptr + unit, value, mask=there, sem="relaxed")
    else:
        for column in range(0, WIDTH, COLUMNS):
            at = column + tl.arange(0, COLUMNS)[None, :]
            mask = there[:, None] & (at < WIDTH)
            of = values + rank[:, None].to(tl.int64) * WIDTH + at
            value = tl.load(of, mask=mask, other=0).to(kind)
            to = into_ptr + unit[:, None] * WIDTH + at
            if REPLACES:
                tl.store(to, value, mask=mask)
            elif ALONE:
                held = tl.load(to, mask=mask, other=0)
                tl.store(to, held + value, mask=mask)
            else:
                tl.atomic_add(to, value, mask=mask, sem="relaxed")
