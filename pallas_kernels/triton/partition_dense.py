"""Algorithm 1 from a dense vector in Triton: one launch, one read of the gradient.

Few elements are not zero, and a hash and a swap also for each zero would cost more than the
read: Triton's swap takes no mask. So a program packs a block into bits, appends the indices
of set bits to a scratch buffer of its own, over several blocks, and then reads and places
them, a whole chunk at a time, after a barrier of its threads. Indices that do not fill a
chunk are moved to the front of the buffer and wait for more. There are only as many
programs as can run at a time, so all scratch buffers together stay in the cache.

The flags are packed to bits because a prefix sum over all flags of a block takes about
fifty instructions for each element, where this takes fourteen. In the time in which an
element is read a processor can execute at most thirty.
"""

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.rank_select import unsigned
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.partition import empty, filled, into_memory
from pallas_kernels.triton.words import count_bits, list_bits, nonzero


_BLOCK = 8192  # elements that a program reads at a time
_CHUNK = 256  # non-zero elements that a program places at a time, one for each thread
_WARPS = 8
_PROGRAMS = 132 * 4  # an H200 has 132 processors; with 64 registers four run on each


def partition_dense(x, seeds, *, memory):
    """See `pallas_kernels.partition_dense`."""
    programs = min(triton.cdiv(x.size, _BLOCK), _PROGRAMS)
    *done, _ = launch(
        partition_dense_kernel,
        programs,
        (unsigned(x), jax.lax.bitcast_convert_type(seeds, jnp.int32)),
        in_place=empty(x.size, memory),
        results=[jax.ShapeDtypeStruct((programs * (_BLOCK + _CHUNK),), jnp.int32)],
        warps=_WARPS,
        SIZE=x.size,
        PROGRAMS=programs,
        MEMORY=memory,
        BLOCK=_BLOCK,
        CHUNK=_CHUNK,
    )
    return filled(*done, memory)


@triton.jit
def partition_dense_kernel(
    x_ptr,
    seeds_ptr,
    _memory,
    _counts,
    _left,
    memory_ptr,
    counts_ptr,
    left_ptr,
    scratch_ptr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MEMORY: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Places the non-zero elements of every PROGRAMS-th block in each program."""
    program = tl.program_id(0)
    own = scratch_ptr + program * (BLOCK + CHUNK)
    into = memory_ptr, counts_ptr, left_ptr
    thread = tl.arange(0, CHUNK)
    held = 0
    for turn in range(0, (SIZE + BLOCK * PROGRAMS - 1) // (BLOCK * PROGRAMS)):
        word = (turn * PROGRAMS + program) * BLOCK + tl.arange(0, BLOCK // 32) * 32
        words = nonzero(x_ptr, word, SIZE)
        counts = count_bits(words)
        first_of = held + tl.cumsum(counts, 0) - counts
        list_bits(words, word, own, first_of, BLOCK + CHUNK)
        held += tl.sum(counts)
        tl.debug_barrier()
        whole = held // CHUNK * CHUNK
        first = 0
        while first < whole:
            index = tl.load(own + first + thread)
            into_memory(index, thread >= 0, index, seeds_ptr, into, MEMORY)
            first += CHUNK
        held -= whole
        rest = tl.load(own + whole + thread, mask=thread < held, other=0)
        # All threads must have read the rest before it is overwritten.
        tl.debug_barrier()
        tl.store(own + thread, rest, mask=thread < held)
    tl.debug_barrier()
    # Idle threads hash their own numbers, so that they do not all swap at one address.
    idle = program * CHUNK + thread
    index = tl.load(own + thread, mask=thread < held, other=0)
    waiting = thread < held
    into_memory(tl.where(waiting, index, idle), waiting, index, seeds_ptr, into, MEMORY)
