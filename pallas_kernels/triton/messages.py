"""Messages in Triton: one launch packs them, and one unpacks and adds them up.

A program processes consecutive entries of one part, or of one sender: as many as have
`_TILE[0]` numbers in their values, or a few if values are longer rows. A program after the
last entry returns at once. It processes its entries once for string and lanes, with one or
a few entries for each thread, and then their values, by columns if they are rows.

It finds the bits of its entries by their ranks, in the bits of a set or in the string of a
message: first the row of words by halving, in prefix sums that are computed before the
launch, then the word and the bit. No list of all entries is written and read again.

The bits of a string ascend with the entries, so all bits of one word are from neighbouring
entries. Prefix sums of bits from the program's first entry on, modulo 2^32, give a word as
the sum at its last entry minus the sum before its first: two atomic additions for each word
and program. An earlier launch has cleared the messages, except where values will be written
and after the end.

The entries of one sender are added without atomics, since no two of them have the same
unit. So an ordered sum (`reference.ordered`) takes a launch for each sender; other sums
take one launch with atomics.
"""

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jax import lax

from pallas_kernels.reference.messages import row_ends
from pallas_kernels.triton.bitmap import unpack_bitmaps
from pallas_kernels.triton.index_message import index_message
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.slots import (
    EntryConfig,
    entries_here,
    find_bits,
    seeds_of,
    striped_unit,
    values_at,
)


_TILE = 1024, 256  # the most numbers of a program's values at a time, and of one value
_WARPS = 8
_CLEARED = 4096  # words that a program clears


def pack_message(sets, array, numbers, *, spec):
    """See `pallas_kernels.pack_message`."""
    slots, counts, units, ends = sets
    if ends is None:
        ends = slots if sets.is_listed else row_ends(slots)
    form = EntryConfig.of(spec, array, slots.shape[1], ends.shape[1], _TILE)
    # An operand, so that one kernel is compiled for messages of all sizes.
    stride = jnp.array([spec.packed], jnp.int32)
    operands = slots, ends, counts, numbers, array.reshape(-1)
    listed_units = counts if units is None else units
    (message,) = launch(
        pack_message_kernel,
        len(slots) * form.blocks,
        (*operands, listed_units, seeds_of(spec.units), stride),
        in_place=(_cleared(counts, numbers, stride, spec.packed, form),),
        warps=_WARPS,
        LISTED=int(sets.is_listed),
        GIVEN=int(units is not None),
        FORM=form,
    )
    return lax.bitcast_convert_type(message, jnp.uint32)


def unpack_message(into, received, numbers, *, spec, how):
    """See `pallas_kernels.unpack_message`."""
    if spec.bitmaps:
        return unpack_bitmaps(into, received, numbers, spec=spec, how=how)
    message, ends, values = received
    if ends is None:
        _, ends = index_message(message, numbers, spec=spec)
    form = EntryConfig.of(spec, into, spec.longest, ends.shape[1], _TILE)
    last = how.until(spec.room)
    alone = values is not None
    values = values if alone else message
    # An operand, so that one kernel is compiled for messages of all sizes, and all senders.
    sizes = [message.shape[1], values.shape[1], how.first, last, int(alone)]
    in_turn = how.ordered and not how.replaces
    each, sums = 1 if in_turn else len(message), into.reshape(-1)
    for sender in range(0, len(message), each):
        run = jnp.array([*sizes, sender, each], jnp.int32)
        (sums,) = launch(
            unpack_message_kernel,
            each * triton.cdiv(last - how.first, form.block),
            (message, values, ends, numbers, run, seeds_of(spec.units)),
            in_place=(sums,),
            warps=_WARPS,
            REPLACES=int(how.replaces),
            ALONE=int(each == 1),
            FORM=form,
        )
    return sums.reshape(into.shape)


def _cleared(counts, numbers, stride, words, form):
    """Makes messages that are zero except where values will be, and unspecified after."""
    (message,) = launch(
        clear_message_kernel,
        len(counts) * triton.cdiv(words, _CLEARED),
        (counts, numbers, stride),
        results=[jax.ShapeDtypeStruct((len(counts), words), jnp.int32)],
        warps=_WARPS,
        ROOM=form.room,
        UNIT=form.unit,
        AT=form.at,
        BLOCK=_CLEARED,
    )
    return message


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
    """Clears words of a message, except those of its values, in each program."""
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
    # A word that values fill by half is cleared, too. The number of bytes may exceed int32.
    values_end = values + tl.maximum(here, 0).to(tl.int64) * UNIT // 4
    word = begin + tl.arange(0, BLOCK)
    mask = (word < end) & ((word < values) | (word >= values_end))
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
    GIVEN: tl.constexpr,
    FORM: tl.constexpr,
):
    """Writes consecutive entries of a part in each program, and the header in its first."""
    part = tl.program_id(0) // FORM.blocks
    begin = tl.program_id(0) % FORM.blocks * FORM.block
    own = message_ptr + part.to(tl.int64) * tl.load(stride_ptr)
    run = numbers_ptr + FORM.at
    count = tl.load(counts_ptr + part)
    tl.store(own, count, mask=begin == 0)
    here = entries_here(count, run, FORM.room)
    if begin >= here:
        return
    number = tl.arange(0, FORM.block)
    rank = begin + number
    there = rank < here
    entry = part.to(tl.int64) * FORM.room + rank
    if LISTED:
        slot = tl.load(slots_ptr + entry, mask=there, other=0)
    else:
        bits = slots_ptr + part.to(tl.int64) * FORM.bits
        ends = ends_ptr + part.to(tl.int64) * FORM.rows
        slot = find_bits(bits, ends, tl.load(run) + rank, there, FORM)

    has_lanes = tl.load(run + 5)
    shift = tl.load(run + 7)
    if tl.load(run + 6) != 0:
        bit = (slot >> shift) + has_lanes * rank
        word = bit >> 5
        mark = (there.to(tl.uint32) << (bit & 31).to(tl.uint32)).to(tl.int32)
        # The interpreter sums in 64 bits, of which the upper ones must be dropped.
        sums = tl.cumsum(mark, 0).to(tl.int64).to(tl.int32)
        before = tl.gather(word, tl.maximum(number - 1, 0), 0)
        following = tl.gather(word, tl.minimum(number + 1, FORM.block - 1), 0)
        is_first = (number > 0) & (before != word)
        is_last = (rank + 1 == here) | (number + 1 == FORM.block) | (following != word)
        string = own + tl.load(run + 2)
        tl.atomic_add(string + word, sums, mask=there & is_last, sem="relaxed")
        tl.atomic_add(string + word, mark - sums, mask=there & is_first, sem="relaxed")

    octets = own.to(tl.pointer_type(tl.uint8), bitcast=True)
    PLANES: tl.constexpr = FORM.planes
    for plane in tl.static_range(PLANES):
        lane = octets + tl.load(run + 9 + 2 * plane).to(tl.int64) * 4
        sent = tl.load(run + 10 + 2 * plane) != 0
        low = (slot >> 8 * plane) & 255
        tl.store(lane + rank, low.to(tl.uint8), mask=there & sent)

    unit = slot
    if GIVEN:
        unit = tl.load(units_ptr + entry, mask=there, other=0)
    if FORM.parts:
        unit = striped_unit(part, slot, seeds_ptr, FORM)
    unit = tl.minimum(tl.maximum(unit, 0), FORM.size - 1).to(tl.int64)
    values = values_at(own + tl.load(run + 4), FORM)
    if FORM.width == 1:
        value = tl.load(array_ptr + unit, mask=there, other=0)
        tl.store(values + rank, value.to(values.dtype.element_ty), mask=there)
    else:
        for column in range(0, FORM.width, FORM.columns):
            at = column + tl.arange(0, FORM.columns)[None, :]
            mask = there[:, None] & (at < FORM.width)
            value = tl.load(array_ptr + unit[:, None] * FORM.width + at, mask=mask, other=0)
            to = values + rank[:, None].to(tl.int64) * FORM.width + at
            tl.store(to, value.to(values.dtype.element_ty), mask=mask)


@triton.jit
def unpack_message_kernel(
    message_ptr,
    values_ptr,
    ends_ptr,
    numbers_ptr,
    sizes_ptr,
    seeds_ptr,
    _into,
    into_ptr,
    REPLACES: tl.constexpr,
    ALONE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Adds or writes consecutive entries of a sender in each program, senders in turn."""
    first = tl.load(sizes_ptr + 2)
    last = tl.load(sizes_ptr + 3)
    senders = tl.load(sizes_ptr + 6)
    sender = tl.load(sizes_ptr + 5) + tl.program_id(0) % senders
    begin = first + tl.program_id(0) // senders * FORM.block
    own = message_ptr + sender.to(tl.int64) * tl.load(sizes_ptr)
    run = numbers_ptr + FORM.at
    here = entries_here(tl.load(own).to(tl.int32, bitcast=True), run, FORM.room)
    here = tl.minimum(here, last)
    if begin >= here:
        return
    rank = begin + tl.arange(0, FORM.block)
    there = rank < here
    slot = tl.zeros_like(rank)
    if tl.load(run + 6) != 0:
        ends = ends_ptr + sender.to(tl.int64) * FORM.rows
        bit = find_bits(own + 1, ends, rank, there, FORM)
        slot = (bit - tl.load(run + 5) * rank) << tl.load(run + 7)
    octets = own.to(tl.pointer_type(tl.uint8), bitcast=True)
    PLANES: tl.constexpr = FORM.planes
    for plane in tl.static_range(PLANES):
        lane = octets + tl.load(run + 9 + 2 * plane).to(tl.int64) * 4
        sent = tl.load(run + 10 + 2 * plane) != 0
        low = tl.load(lane + rank, mask=there & sent, other=0)
        slot = slot | (low.to(tl.int32) << 8 * plane)

    unit = slot
    if FORM.parts:
        unit = striped_unit(sender, slot, seeds_ptr, FORM)
    there = there & (unit >= 0) & (unit < FORM.size)
    unit = unit.to(tl.int64)
    # A piece with values alone begins with the value of its first entry.
    own_values = values_ptr + sender.to(tl.int64) * tl.load(sizes_ptr + 1)
    begins = tl.load(run + 4).to(tl.int64)
    if tl.load(sizes_ptr + 4) != 0:
        begins = -(first.to(tl.int64) // 4 * FORM.unit)
    values = values_at(own_values + begins, FORM)
    kind: tl.constexpr = into_ptr.dtype.element_ty
    if FORM.width == 1:
        value = tl.load(values + rank, mask=there, other=0).to(kind)
        if REPLACES:
            tl.store(into_ptr + unit, value, mask=there)
        elif ALONE:
            held = tl.load(into_ptr + unit, mask=there, other=0)
            tl.store(into_ptr + unit, held + value, mask=there)
        else:
            tl.atomic_add(into_ptr + unit, value, mask=there, sem="relaxed")
    else:
        for column in range(0, FORM.width, FORM.columns):
            at = column + tl.arange(0, FORM.columns)[None, :]
            mask = there[:, None] & (at < FORM.width)
            of = values + rank[:, None].to(tl.int64) * FORM.width + at
            value = tl.load(of, mask=mask, other=0).to(kind)
            to = into_ptr + unit[:, None] * FORM.width + at
            if REPLACES:
                tl.store(to, value, mask=mask)
            elif ALONE:
                held = tl.load(to, mask=mask, other=0)
                tl.store(to, held + value, mask=mask)
            else:
                tl.atomic_add(to, value, mask=mask, sem="relaxed")
