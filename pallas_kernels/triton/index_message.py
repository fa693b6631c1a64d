"""What is looked up in messages that were received: their headers, and bits row by row.

A program counts the bits of some rows of a message's string. Of each message another adds
the counts up: they are few. How long messages and their strings are is data, so one kernel
does it for messages of all sizes.

Of bitmaps that are unpacked in the order of an array (`bitmap`) each word is ranked, too.
"""

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.reference.messages import row_words
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.words import count_bits


_WORDS = 4096  # that a program counts the bits of
_ROWS = 4096  # that a program adds up at a time


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
    """The words of bitmaps, each beside the bits before it: int32 [longest, senders, 2].

    Args:
        message: uint32 [senders, words], with the bitmap after the header.
        ends: int32 [senders, rows], the bits up to the end of each row of its words.
        longest: Words of the bitmap.
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
    """A program adds up the counts of a message, up to each row.

    Not in place: several threads may load one count, and a sum that is stored there by the
    first of them would be what the next one loads.
    """
    before = 0
    for begin in range(0, ROWS, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        own = tl.program_id(0).to(tl.int64) * ROWS + row
        counts = tl.load(counts_ptr + own, mask=row < ROWS, other=0)
        # The interpreter adds up in 64 bits.
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
    """A program counts the bits of a run of rows, and the first reads the header."""
    blocks: tl.constexpr = (ROWS + BLOCK - 1) // BLOCK
    sender = tl.program_id(0) // blocks
    begin = tl.program_id(0) % blocks * BLOCK
    own = message_ptr + sender.to(tl.int64) * tl.load(stride_ptr)
    head = tl.load(own).to(tl.int32, bitcast=True)
    tl.store(heads_ptr + sender, head, mask=begin == 0)
    row = begin + tl.arange(0, BLOCK)
    word = row[:, None] * ROW + tl.arange(0, ROW)[None, :]
    # Lanes and values that lie where a longer string would are no bits to be counted.
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
    """A program ranks the words of a row, of all senders."""
    row = tl.program_id(0)
    sender = tl.arange(0, BLOCK)[None, :]
    word = row * ROW + tl.arange(0, ROW)[:, None]
    there = (sender < SENDERS) & (word < WORDS)
    own = message_ptr + sender.to(tl.int64) * tl.load(stride_ptr) + 1
    words = tl.load(own + word, mask=there, other=0)
    counts = count_bits(words.to(tl.uint32, bitcast=True))
    ends = ends_ptr + sender * ROWS + row - 1
    before = tl.load(ends, mask=(sender < SENDERS) & (row > 0), other=0)
    # The interpreter adds up in 64 bits.
    rank = (before + tl.cumsum(counts, 0) - counts).to(tl.int32)
    to = table_ptr + (word * SENDERS + sender) * 2
    tl.store(to, words.to(tl.int32, bitcast=True), mask=there)
    tl.store(to + 1, rank, mask=there)
