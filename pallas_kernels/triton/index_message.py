"""Reads the headers of received messages, and counts the bits of their strings, by rows.

In the first launch a program counts the bits of some rows of a message's string. In the
second one program for each message computes the prefix sums of these counts, which are few.
The lengths of messages and strings are data, so one kernel is compiled for all sizes.

For bitmaps that are unpacked in the order of an array (`bitmap`) a third launch computes
the rank of each word.
"""

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.reference.messages import row_words
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.words import count_bits


_WORDS = 4096  # words whose bits a program counts
_ROWS = 4096  # rows whose counts a program sums at a time


def index_message(message, numbers, *, spec):
    """See `pallas_kernels.index_message`."""
    senders, longest, row = len(message), spec.longest, row_words(spec.longest)
    rows = triton.cdiv(longest, row)
    block = min(max(1, _WORDS // row), triton.next_power_of_2(rows))
    heads, counts = launch(
        count_rows_kernel,
        senders * triton.cdiv(rows, block),
        (message, numbers, jnp.array([message.shape[1]], jnp.int32)),
        results=[
            jax.ShapeDtypeStruct((senders,), jnp.int32),
            jax.ShapeDtypeStruct((senders, rows), jnp.int32),
        ],
        ROWS=rows,
        ROW=row,
        AT=spec.at,
        BLOCK=block,
    )
    (ends,) = launch(
        sum_rows_kernel,
        senders,
        (counts,),
        results=[jax.ShapeDtypeStruct((senders, rows), jnp.int32)],
        ROWS=rows,
        BLOCK=min(_ROWS, triton.next_power_of_2(rows)),
    )
    return heads, rank_words(message, ends, longest) if spec.bitmaps else ends


def rank_words(message, ends, longest):
    """Returns the words of bitmaps, and the bits before each: int32 [longest, senders, 2].

    Args:
        message: uint32 [senders, words], with the bitmap after the header.
        ends: int32 [senders, rows], the bits up to the end of each row of its words.
        longest: The number of words of the bitmap.
    """
    senders, row = len(message), row_words(longest)
    (table,) = launch(
        rank_words_kernel,
        triton.cdiv(longest, row),
        (message, ends, jnp.array([message.shape[1]], jnp.int32)),
        results=[jax.ShapeDtypeStruct((longest, senders, 2), jnp.int32)],
        WORDS=longest,
        ROWS=ends.shape[1],
        ROW=row,
        SENDERS=senders,
        BLOCK=triton.next_power_of_2(senders),
    )
    return table


@triton.jit
def sum_rows_kernel(counts_ptr, ends_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Computes the prefix sums of the counts of one message in each program.

    They are not written in place: several threads may load one count, and a later one would
    load the sum that the first has stored.
    """
    before = 0
    for begin in range(0, ROWS, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        own = tl.program_id(0).to(tl.int64) * ROWS + row
        counts = tl.load(counts_ptr + own, mask=row < ROWS, other=0)
        # The interpreter sums in 64 bits.
        ends = (before + tl.cumsum(counts, 0)).to(tl.int32)
        tl.store(ends_ptr + own, ends, mask=row < ROWS)
        before += tl.sum(counts, 0).to(tl.int32)


@triton.jit
def count_rows_kernel(
    message_ptr,
    numbers_ptr,
    stride_ptr,
    heads_ptr,
    counts_ptr,
    ROWS: tl.constexpr,
    ROW: tl.constexpr,
    AT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts the bits of consecutive rows in each program; the first reads the header."""
    blocks: tl.constexpr = (ROWS + BLOCK - 1) // BLOCK
    sender = tl.program_id(0) // blocks
    begin = tl.program_id(0) % blocks * BLOCK
    own = message_ptr + sender.to(tl.int64) * tl.load(stride_ptr)
    head = tl.load(own).to(tl.int32, bitcast=True)
    tl.store(heads_ptr + sender, head, mask=begin == 0)
    row = begin + tl.arange(0, BLOCK)
    word = row[:, None] * ROW + tl.arange(0, ROW)[None, :]
    # Lanes and values after a string that is shorter than the longest are not counted.
    bits = tl.load(own + 1 + word, mask=word < tl.load(numbers_ptr + AT + 3), other=0)
    counts = tl.sum(count_bits(bits.to(tl.uint32, bitcast=True)), axis=1)
    own_counts = counts_ptr + sender.to(tl.int64) * ROWS
    tl.store(own_counts + row, counts.to(tl.int32), mask=row < ROWS)


@triton.jit
def rank_words_kernel(
    message_ptr,
    ends_ptr,
    stride_ptr,
    table_ptr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW: tl.constexpr,
    SENDERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Ranks the words of one row, for all senders, in each program."""
    row = tl.program_id(0)
    sender = tl.arange(0, BLOCK)[None, :]
    word = row * ROW + tl.arange(0, ROW)[:, None]
    there = (sender < SENDERS) & (word < WORDS)
    own = message_ptr + sender.to(tl.int64) * tl.load(stride_ptr) + 1
    words = tl.load(own + word, mask=there, other=0)
    counts = count_bits(words.to(tl.uint32, bitcast=True))
    ends = ends_ptr + sender * ROWS + row - 1
    before = tl.load(ends, mask=(sender < SENDERS) & (row > 0), other=0)
    # The interpreter sums in 64 bits.
    rank = (before + tl.cumsum(counts, 0) - counts).to(tl.int32)
    to = table_ptr + (word * SENDERS + sender) * 2
    tl.store(to, words.to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 1, rank, mask=there)
