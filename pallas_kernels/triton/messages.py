"""Messages in Triton: one launch that writes them, and one that reads and adds them up.

A program has a run of entries of one part, or of one sender: so many that their values are
`_NUMBERS` numbers, or a few rows of them where rows are longer. Behind the last entry it
leaves at once. It goes over its entries once, a thread an entry or a few, for string and
lanes, and then over their values, column by column where they are rows.

The bits of a string ascend with the entries, so all that are in one word are a run of
neighbours. Sums of marks from the program's first entry on, modulo 2^32, give a word as the
sum at the last of its run less the sum before the first: two atomic additions a word and
program, where one for each bit would meet up to 32 others at one address.

An atomic addition of float32 takes denormals for zero on GPUs of NVIDIA, here as in XLA.
"""

import math

import jax.numpy as jnp
import numpy as np
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jax import lax

from pallas_kernels import striping
from pallas_kernels.reference.messages import SINGLE, Places, find_bits
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.words import mix


_NUMBERS = 1024  # of the values of a program's entries at a time
_COLUMNS = 256  # and of one entry, where it has so many
_KINDS = {jnp.dtype(kind): i for i, kind in enumerate(("float32", "float16", "bfloat16"))}


def pack_message(slots, counts, first, length, row, array, *given, words, dtype, units):
    """See `pallas_kernels.pack_message`."""
    parts, room = slots.shape
    width = math.prod(array.shape[1:])
    block, columns = _sizes(width)
    (message,) = launch(
        pack_message_kernel,
        parts * triton.cdiv(room, block),
        (
            slots,
            counts,
            _numbers(first, length, row),
            array.reshape(-1),
            given[0] if given else slots,
            _seeds(units),
        ),
        in_place=(jnp.zeros((parts, words), jnp.int32),),
        ROOM=room,
        WORDS=words,
        SIZE=len(array),
        WIDTH=width,
        PLANES=(row.size - SINGLE) // 2,
        KIND=_KINDS[dtype],
        GIVEN=len(given),
        **_striped(units),
        BLOCK=block,
        COLUMNS=columns,
    )
    return lax.bitcast_convert_type(message, jnp.uint32)


def unpack_message(
    into, message, counts, first, length, row, *, entries, longest, dtype, sets, units
):
    """See `pallas_kernels.unpack_message`."""
    senders, words = message.shape
    width = math.prod(into.shape[1:])
    block, columns = _sizes(width)
    here = jnp.clip(counts - first, 0, jnp.minimum(length, entries))
    found = find_bits(message, here, Places(row), entries, longest)
    (sums,) = launch(
        unpack_message_kernel,
        senders * triton.cdiv(entries, block),
        (message, found, counts, _numbers(first, length, row), _seeds(units)),
        in_place=(into.reshape(-1),),
        ROOM=entries,
        WORDS=words,
        SIZE=len(into),
        WIDTH=width,
        PLANES=(row.size - SINGLE) // 2,
        KIND=_KINDS[dtype],
        SETS=int(sets),
        **_striped(units),
        BLOCK=block,
        COLUMNS=columns,
    )
    return sums.reshape(into.shape)


def _sizes(width):
    """Entries of a program, and the columns of their values that it handles at a time."""
    columns = min(triton.next_power_of_2(width), _COLUMNS)
    return max(4, _NUMBERS // columns), columns


def _numbers(first, length, row):
    """All that is data and the same for all programs, in one array: one kernel makes it."""
    return jnp.concatenate([jnp.stack([first, length]), row])


def _seeds(units):
    """Of the hashes that say how a slot is turned."""
    if units is None:
        return jnp.zeros(1, jnp.int32)
    seeds = striping.turn_seeds(units.parts, units.seed)
    return jnp.asarray(seeds.view(np.int32))


def _striped(units):
    """What else a kernel has to know of a map from slots to units; no parts if none."""
    if units is None:
        return {"PARTS": 0, "BITS": 0, "COLUMN": 0}
    bits = striping.turn_seeds(units.parts, units.seed).size
    column = striping.width(units.size, units.parts)
    return {"PARTS": units.parts, "BITS": bits, "COLUMN": column}


@triton.jit
def pack_message_kernel(
    slots_ptr,
    counts_ptr,
    numbers_ptr,
    array_ptr,
    units_ptr,
    seeds_ptr,
    _message,
    message_ptr,
    ROOM: tl.constexpr,
    WORDS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PLANES: tl.constexpr,
    KIND: tl.constexpr,
    GIVEN: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program writes a run of entries of a part, and the first of them the header."""
    blocks: tl.constexpr = (ROOM + BLOCK - 1) // BLOCK
    part = tl.program_id(0) // blocks
    begin = tl.program_id(0) % blocks * BLOCK
    own = message_ptr + part.to(tl.int64) * WORDS
    count = tl.load(counts_ptr + part)
    tl.store(own, count, mask=begin == 0)
    here = entries_here(count, numbers_ptr, ROOM)
    if begin >= here:
        return
    rank = begin + tl.arange(0, BLOCK)
    there = rank < here
    entry = part.to(tl.int64) * ROOM + rank
    slot = tl.load(slots_ptr + entry, mask=there, other=0)

    has_lanes = tl.load(numbers_ptr + 5)
    shift = tl.load(numbers_ptr + 7)
    if tl.load(numbers_ptr + 6) != 0:
        string = own + tl.load(numbers_ptr + 2)
        bit = (slot >> shift) + has_lanes * rank
        before = tl.load(slots_ptr + entry - 1, mask=there & (rank > begin), other=0)
        behind = tl.load(slots_ptr + entry + 1, mask=rank + 1 < here, other=0)
        before = (before >> shift) + has_lanes * (rank - 1)
        behind = (behind >> shift) + has_lanes * (rank + 1)
        mark = (there.to(tl.uint32) << (bit & 31).to(tl.uint32)).to(tl.int32)
        # The interpreter adds up in 64 bits, and has to be told to forget the upper ones.
        sums = tl.cumsum(mark, 0).to(tl.int64).to(tl.int32)
        last = (rank + 1 == here) | (rank + 1 == begin + BLOCK) | (behind >> 5 != bit >> 5)
        is_first = (rank > begin) & (before >> 5 != bit >> 5)
        word = string + (bit >> 5)
        tl.atomic_add(word, sums, mask=there & last, sem="relaxed")
        tl.atomic_add(word, mark - sums, mask=there & is_first, sem="relaxed")

    octets = own.to(tl.pointer_type(tl.uint8), bitcast=True)
    for plane in tl.static_range(PLANES):
        lane = octets + tl.load(numbers_ptr + 8 + 2 * plane).to(tl.int64) * 4
        sent = tl.load(numbers_ptr + 9 + 2 * plane) != 0
        low = (slot >> 8 * plane) & 255
        tl.store(lane + rank, low.to(tl.uint8), mask=there & sent)

    unit = slot
    if GIVEN:
        unit = tl.load(units_ptr + entry, mask=there, other=0)
    if PARTS:
        unit = striped_unit(part, slot, seeds_ptr, PARTS, BITS, COLUMN)
    # As "clip" has it; unsigned, what is negative would be the last.
    unit = tl.minimum(tl.maximum(unit, 0), SIZE - 1).to(tl.int64)
    values = values_of(own, numbers_ptr, KIND)
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
    found_ptr,
    counts_ptr,
    numbers_ptr,
    seeds_ptr,
    _into,
    into_ptr,
    ROOM: tl.constexpr,
    WORDS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PLANES: tl.constexpr,
    KIND: tl.constexpr,
    SETS: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program adds, or sets, a run of entries of a sender."""
    blocks: tl.constexpr = (ROOM + BLOCK - 1) // BLOCK
    sender = tl.program_id(0) // blocks
    begin = tl.program_id(0) % blocks * BLOCK
    own = message_ptr + sender.to(tl.int64) * WORDS
    here = entries_here(tl.load(counts_ptr + sender), numbers_ptr, ROOM)
    if begin >= here:
        return
    rank = begin + tl.arange(0, BLOCK)
    there = rank < here
    found = tl.load(found_ptr + sender.to(tl.int64) * ROOM + rank, mask=there, other=0)
    block = (found - tl.load(numbers_ptr + 5) * rank) * tl.load(numbers_ptr + 6)
    slot = block << tl.load(numbers_ptr + 7)
    octets = own.to(tl.pointer_type(tl.uint8), bitcast=True)
    for plane in tl.static_range(PLANES):
        lane = octets + tl.load(numbers_ptr + 8 + 2 * plane).to(tl.int64) * 4
        sent = tl.load(numbers_ptr + 9 + 2 * plane) != 0
        low = tl.load(lane + rank, mask=there & sent, other=0)
        slot = slot | (low.to(tl.int32) << 8 * plane)

    unit = slot
    if PARTS:
        unit = striped_unit(sender, slot, seeds_ptr, PARTS, BITS, COLUMN)
    there = there & (unit >= 0) & (unit < SIZE)
    unit = unit.to(tl.int64)
    values = values_of(own, numbers_ptr, KIND)
    kind: tl.constexpr = into_ptr.dtype.element_ty
    if WIDTH == 1:
        value = tl.load(values + rank, mask=there, other=0)
        if SETS:
            tl.store(into_ptr + unit, value.to(kind), mask=there)
        else:
            tl.atomic_add(into_ptr + unit, value.to(kind), mask=there, sem="relaxed")
    else:
        for column in range(0, WIDTH, COLUMNS):
            at = column + tl.arange(0, COLUMNS)[None, :]
            mask = there[:, None] & (at < WIDTH)
            of = values + rank[:, None].to(tl.int64) * WIDTH + at
            value = tl.load(of, mask=mask, other=0).to(kind)
            to = into_ptr + unit[:, None] * WIDTH + at
            if SETS:
                tl.store(to, value, mask=mask)
            else:
                tl.atomic_add(to, value, mask=mask, sem="relaxed")


@triton.jit
def entries_here(count, numbers_ptr, ROOM: tl.constexpr):
    """How many entries a message has, of a part that has so many in all."""
    here = tl.minimum(count - tl.load(numbers_ptr), tl.load(numbers_ptr + 1))
    return tl.minimum(here, ROOM)


@triton.jit
def values_of(own, numbers_ptr, KIND: tl.constexpr):
    """Where the values of a message begin, as a pointer to numbers of their kind."""
    values = own + tl.load(numbers_ptr + 4)
    if KIND == 0:
        return values.to(tl.pointer_type(tl.float32), bitcast=True)
    elif KIND == 1:
        return values.to(tl.pointer_type(tl.float16), bitcast=True)
    else:
        return values.to(tl.pointer_type(tl.bfloat16), bitcast=True)


@triton.jit
def striped_unit(
    part,
    slot,
    seeds_ptr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    COLUMN: tl.constexpr,
):
    """`striping.invert`: the unit of each slot of a part."""
    turn = tl.zeros_like(slot)
    for k in tl.static_range(BITS):
        seed = tl.load(seeds_ptr + k).to(tl.uint32, bitcast=True)
        ones = mix((slot >> 5).to(tl.uint32), seed) >> (slot & 31).to(tl.uint32)
        turn += (ones & 1).to(tl.int32) * ((1 << k) % PARTS)
    return (part + PARTS - turn % PARTS) % PARTS * COLUMN + slot
