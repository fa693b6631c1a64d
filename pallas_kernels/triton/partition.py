"""Algorithm 1 of Zen in Triton: one launch, with compare-and-swap.

Each index tries to swap itself for "empty" in its slot. An index that gets "empty" back has
the slot for good, since all swaps are for "empty". So an index is in one slot or in none,
and no barrier is needed, unlike for the paper's write and read back
(`pallas_kernels.pallas.partition`). An index that finds all its slots taken gets a ticket
of its part's serial memory by one atomic addition. Tickets past the end count the indices
without a place, which are flagged in `left`.

Without hashes all indices go to the serial memories: a program counts its indices by part,
reserves a range of each part by one atomic addition, and writes once. It is the alternative
to hashes: fewer atomics, on only as many words as there are parts, and a scan for each
part.
"""

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.rank_select import WORD, unpack
from pallas_kernels.reference.bitmap import EMPTY
from pallas_kernels.reference.partitions import Partitioned
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.words import place


_BLOCK = 512


def partition(indices, count, seeds, *, memory):
    """See `pallas_kernels.partition`."""
    done = launch(
        partition_kernel,
        triton.cdiv(indices.size, _BLOCK),
        (indices, count.reshape(1), jax.lax.bitcast_convert_type(seeds, jnp.int32)),
        in_place=empty(indices.size, memory),
        SIZE=indices.size,
        MEMORY=memory,
        BLOCK=_BLOCK,
    )
    done = filled(*done, memory)
    return done._replace(left=unpack(done.left)[: indices.size])


def empty(size, memory):
    """Returns empty memories, zero counts for serial memories, and bits for those left."""
    return (
        jnp.full(memory.parts * memory.room, EMPTY, jnp.int32),
        jnp.zeros(memory.parts, jnp.int32),
        jnp.zeros(-(-size // WORD), jnp.int32),
    )


def filled(places, counts, left, memory):
    """Makes the `Partitioned` of the results of a kernel."""
    left = jax.lax.bitcast_convert_type(left, jnp.uint32)
    return Partitioned(places.reshape(memory.parts, memory.room), counts, left)


@triton.jit
def partition_kernel(
    indices_ptr,
    count_ptr,
    seeds_ptr,
    _memory,
    _counts,
    _left,
    memory_ptr,
    counts_ptr,
    left_ptr,
    SIZE: tl.constexpr,
    MEMORY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Places consecutive indices in each program."""
    count = tl.minimum(tl.load(count_ptr), SIZE)
    first = tl.program_id(0) * BLOCK
    if first >= count:
        return
    lane = first + tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + lane, mask=lane < count, other=-1)
    waiting = index >= 0
    # Idle lanes hash their own numbers, so that they do not all swap at one address.
    index = tl.where(waiting, index, lane)
    into = memory_ptr, counts_ptr, left_ptr
    into_memory(index, waiting, lane, seeds_ptr, into, MEMORY)


@triton.jit
def into_memory(index, waiting, name, seeds_ptr, into, MEMORY: tl.constexpr):
    """Places the indices that wait, and sets the bit of `name` of each that is left."""
    memory_ptr, counts_ptr, left_ptr = into
    part = place(index, tl.load(seeds_ptr), MEMORY.parts)
    own = memory_ptr + part * MEMORY.room
    slot = tl.zeros_like(part)
    HASHES: tl.constexpr = MEMORY.hashes
    for k in tl.static_range(HASHES):
        # atomic_cas takes no mask. No slot has -2, so indices that do not wait swap
        # nothing, at the address of their last swap, which is in the cache.
        tried = place(index, tl.load(seeds_ptr + 1 + k), MEMORY.slots)
        slot = tl.where(waiting, tried, slot)
        expected = tl.where(waiting, -1, -2)
        found = tl.atomic_cas(own + slot, expected, index, sem="relaxed")
        waiting = waiting & (found != -1)
    if HASHES == 0:
        ticket = tickets(part, waiting, counts_ptr, MEMORY.parts)
    else:
        ticket = tl.atomic_add(counts_ptr + part, 1, mask=waiting, sem="relaxed")
    fits = waiting & (ticket < MEMORY.serial)
    tl.store(own + MEMORY.slots + ticket, index, mask=fits)
    bit = (1 << (name % 32).to(tl.uint32)).to(tl.int32, bitcast=True)
    over = waiting & (ticket >= MEMORY.serial)
    tl.atomic_or(left_ptr + name // 32, bit, mask=over, sem="relaxed")


@triton.jit
def tickets(part, waiting, counts_ptr, PARTS: tl.constexpr):
    """Returns a ticket of its part for each index that waits, by one addition a part."""
    ticket = tl.zeros_like(part)
    for number in range(PARTS):
        mine = waiting & (part == number)
        ones = mine.to(tl.int32)
        many = tl.sum(ones)
        first = tl.atomic_add(counts_ptr + number, many, mask=many > 0, sem="relaxed")
        ticket = tl.where(mine, first + tl.cumsum(ones, 0) - 1, ticket)
    return ticket
