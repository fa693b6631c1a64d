"""What is looked up in messages that were received: their headers, and bits row by row.

A program counts the bits of some rows of a message's string. Of each message another adds
the counts up: they are few. How long messages and their strings are is data, so one kernel
does it for messages of all sizes.
"""

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.reference.messages import row_words
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.words import count_bits


_WORDS = 4096  # that a program counts the bits of


def index_message(message, numbers, *, longest, planes, at):
    """See `pallas_kernels.index_message`."""
    del planes
    senders, row = len(message), row_words(longest)
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
        AT=at,
        BLOCK=block,
    )
    (ends,) = launch(
        sum_rows_kernel,
        senders,
        (counts,),
        results=[jax.ShapeDtypeStruct((senders, rows), jnp.int32)],
        ROWS=rows,
        BLOCK=triton.next_power_of_2(rows),
    )
    return heads, ends


@triton.jit
def sum_rows_kernel(counts_ptr, ends_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A program adds up the counts of a message, up to each row.

    Not in place: several threads may load one count, and a sum that is stored there by the
    first of them would be what the next one loads.
    """
    row = tl.arange(0, BLOCK)
    own = tl.program_id(0).to(tl.int64) * ROWS + row
    counts = tl.load(counts_ptr + own, mask=row < ROWS, other=0)
    # The interpreter adds up in 64 bits.
    tl.store(ends_ptr + own, tl.cumsum(counts, 0).to(tl.int32), mask=row < ROWS)


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
