"""Bitmap encoding and decoding, and messages with bitmaps, in Triton.

Encoding is bound by memory bandwidth; decoding has a thread for each word and is short. For
both see also `pallas_kernels.pallas.bitmap`.
"""

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jax import lax

from pallas_kernels.rank_select import WORD, run_ends, unsigned
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.slots import EntryConfig, seeds_of, turned, values_at
from pallas_kernels.triton.words import count_bits, list_bits, nonzero


_WORDS = 64  # words that a program packs
_DECODED = 256  # words whose bits a program lists
_SLOTS = 512  # slots of each column of an array that a program writes


def bitmap_encode(x):
    """See `pallas_kernels.bitmap_encode`."""
    words = -(-x.size // WORD)
    (packed,) = launch(
        encode_kernel,
        triton.cdiv(words, _WORDS),
        (unsigned(x),),
        results=[jax.ShapeDtypeStruct((words,), jnp.uint32)],
        SIZE=x.size,
        WORDS=_WORDS,
    )
    return packed


@triton.jit
def encode_kernel(x_ptr, words_ptr, SIZE: tl.constexpr, WORDS: tl.constexpr):
    """Packs consecutive words in each program."""
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    words = nonzero(x_ptr, word * 32, SIZE)
    tl.store(words_ptr + word, words, mask=word < (SIZE + 31) // 32)


def bitmap_decode(words, capacity, fill):
    """See `pallas_kernels.bitmap_decode`; the list is padded with `fill`."""
    ends = run_ends(words, _DECODED)
    (found,) = launch(
        decode_kernel,
        ends.size,
        (words, ends),
        results=[jax.ShapeDtypeStruct((capacity,), jnp.int32)],
        SIZE=words.size,
        CAPACITY=capacity,
        WORDS=_DECODED,
    )
    used = lax.iota(jnp.int32, capacity) < ends[-1]
    return jnp.where(used, found, fill), ends[-1]


@triton.jit
def decode_kernel(
    words_ptr,
    ends_ptr,
    found_ptr,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Writes the positions of the set bits of consecutive words in each program."""
    program = tl.program_id(0)
    word = program * WORDS + tl.arange(0, WORDS)
    words = tl.load(words_ptr + word, mask=word < SIZE, other=0)
    counts = count_bits(words)
    first = tl.load(ends_ptr + program) - tl.sum(counts)
    list_bits(words, word * 32, found_ptr, first + tl.cumsum(counts, 0) - counts, CAPACITY)


def unpack_bitmaps(into, received, numbers, *, spec, how):
    """Unpacks messages with bitmaps: see `pallas_kernels.unpack_message`.

    If a sixth of all numbers are received, nearly every cache line of the array has one.
    Written entry by entry, 19 million numbers into 128 million took 1.05 ms on an H200.
    Here a program writes consecutive elements of the array, zeros included (0.35 ms). For
    each element it reads whether its slot has a bit, and the rank of that bit, from the
    bits before it in its word and before the word (`index_message.rank_words`). The units
    of one slot belong to different parts, and so to different senders, and are in different
    columns of the array (`striping`). A program has consecutive slots of all columns, so
    the words that it reads are few and adjacent.

    If messages are sent in pieces, each piece writes the elements whose ranks are in it.
    """
    message, table, values = received
    alone = values is not None
    values = values if alone else message
    sizes = [values.shape[1], how.first, how.until(spec.room), int(alone)]
    form = EntryConfig.of(spec, into, len(table), 0, (_SLOTS, 1))
    (total,) = launch(
        unpack_bitmaps_kernel,
        triton.cdiv(form.column, form.block),
        (table, values, numbers, jnp.array(sizes, jnp.int32), seeds_of(spec.units)),
        in_place=(into,),
        warps=8,
        FORM=form,
        ALL=triton.next_power_of_2(form.parts),
    )
    return total


@triton.jit
def unpack_bitmaps_kernel(
    table_ptr,
    values_ptr,
    numbers_ptr,
    sizes_ptr,
    seeds_ptr,
    _into,
    into_ptr,
    FORM: tl.constexpr,
    ALL: tl.constexpr,
):
    """Writes consecutive slots of all columns in each program, if they are in the piece."""
    first = tl.load(sizes_ptr + 1)
    last = tl.load(sizes_ptr + 2)
    sender = tl.arange(0, ALL)
    word = tl.program_id(0) * (FORM.block // 32)
    ranks = table_ptr + (word * FORM.parts + sender) * 2 + 1
    least = tl.load(ranks, mask=sender < FORM.parts, other=last)
    has_next = (sender < FORM.parts) & (word + FORM.block // 32 < FORM.bits)
    most = tl.load(ranks + FORM.block // 32 * FORM.parts * 2, mask=has_next, other=last)
    most = tl.where(sender < FORM.parts, most, -1)
    if (tl.min(least, 0) >= last) | (tl.max(most, 0) < first):
        return
    slot = tl.program_id(0) * FORM.block + tl.arange(0, FORM.block)
    inside = slot < FORM.column
    turn = turned(slot, seeds_ptr, FORM)
    bit = (slot & 31).to(tl.uint32)
    # A piece with values alone begins with the value of its first entry.
    begins = tl.load(numbers_ptr + FORM.at + 4)
    if tl.load(sizes_ptr + 3) != 0:
        begins = -(first // 4 * FORM.unit)
    values = values_at(values_ptr + begins, FORM)
    stride = tl.load(sizes_ptr).to(tl.int64) * (4 // FORM.unit)
    for column in range(FORM.parts):
        part = column + turn
        part = tl.where(part >= FORM.parts, part - FORM.parts, part)
        pair = table_ptr + ((slot >> 5) * FORM.parts + part) * 2
        words = tl.load(pair, mask=inside, other=0).to(tl.uint32, bitcast=True)
        lower = words & ((1 << bit) - 1).to(tl.uint32)
        rank = tl.load(pair + 1, mask=inside, other=0) + count_bits(lower)
        unit = slot + tl.full((), FORM.column, tl.int64) * column
        own = inside & (unit < FORM.size) & (rank >= first) & (rank < last)
        is_set = own & ((words >> bit) & 1 != 0)
        value = tl.load(values + part * stride + rank, mask=is_set, other=0)
        tl.store(into_ptr + unit, value.to(into_ptr.dtype.element_ty), mask=own)
