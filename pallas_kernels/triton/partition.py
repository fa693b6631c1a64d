"""Algorithm 1 of Zen in Triton: one launch, with compare-and-swap.

Each index tries to swap itself for "empty" in its slot. Whoever gets "empty" back has the
slot for good, since nobody swaps for anything but "empty"; so an index is in one slot or in
none, and no barrier is needed, unlike with the paper's write and read back
(`pallas_kernels.pallas.partition`). Whoever found all slots taken takes a ticket of its
part's serial memory with one atomic addition. Tickets past the end tell how many found no
place, and which they were is written down.
"""

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels import reference
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.words import place


_BLOCK = 1024


def partition(indices, count, seeds, *, parts, hashes, slots, serial):
    """See `pallas_kernels.partition`."""
    memory = jnp.full(parts * (slots + serial), reference.EMPTY, jnp.int32)
    counts = jnp.zeros(parts, jnp.int32)
    left = jnp.zeros(indices.shape, jnp.int32)
    memory, counts, left = launch(
        partition_kernel,
        triton.cdiv(indices.size, _BLOCK),
        (indices, count.reshape(1), jax.lax.bitcast_convert_type(seeds, jnp.int32)),
        in_place=(memory, counts, left),
        SIZE=indices.size,
        PARTS=parts,
        SLOTS=slots,
        SERIAL=serial,
        HASHES=hashes,
        BLOCK=_BLOCK,
    )
    memory = memory.reshape(parts, slots + serial)
    return reference.Partitioned(memory, counts, left != 0)


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
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    SERIAL: tl.constexpr,
    HASHES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program places a run of indices."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    waiting = (lane < SIZE) & (lane < tl.load(count_ptr))
    index = tl.load(indices_ptr + lane, mask=waiting, other=0)
    part = place(index, tl.load(seeds_ptr), PARTS)
    own = memory_ptr + part * (SLOTS + SERIAL)
    for k in tl.static_range(HASHES):
        slot = place(index, tl.load(seeds_ptr + 1 + k), SLOTS)
        # It takes no mask. -2 is never there, so those that do not wait swap nothing.
        expected = tl.where(waiting, -1, -2)
        found = tl.atomic_cas(own + slot, expected, index, sem="relaxed")
        waiting = waiting & (found != -1)
    ticket = tl.atomic_add(counts_ptr + part, 1, mask=waiting, sem="relaxed")
    fits = waiting & (ticket < SERIAL)
    tl.store(own + SLOTS + ticket, index, mask=fits)
    tl.store(left_ptr + lane, 1, mask=waiting & (ticket >= SERIAL))
