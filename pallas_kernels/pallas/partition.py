"""Algorithm 1 of Zen in Pallas, bulk-synchronous.

The paper's threads write their index where the slot is free, read it back, and take their
slot for won if they find themselves. In one launch that loses indices. Let A and B want the
same free slot. A sees it free; B sees it free, writes, reads itself back and leaves; then A
writes over it, reads itself back and leaves too. B is in no memory and nobody knows: of the
142 ways in which two threads can interleave, 16 end so.

Here each round is two launches, and that mends it, because the end of a launch is a barrier
for the whole grid and makes all its writes visible:

    write    an index that waits and finds its slot empty, *before the launch*, writes
    verify   an index that waits reads its slot, and stops waiting if it finds itself

Between the two nobody writes. A slot that was full before the write stays as it is, so its
index, which was verified in an earlier round, is never lost. A slot that was empty holds,
after the barrier, one of the indices written there (stores of 32 bits are not torn), and
`verify` gives the slot to exactly that index: it finds itself, and every other
finds another and waits on. So after every round each index is either in one slot or
waiting, never both and never neither. After the last, those that wait go to the serial
memories by rank and select, with no atomic operation.

"As it was before the launch" needs no copy. The slot is read in the very launch that writes
it, in place: a thread that sees another's index there instead of the empty slot does not
write, and waits; one that still sees it empty writes over the other, which then finds out
in `verify`. Either way the argument above holds.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import hashing
from pallas_kernels.pallas import launch
from pallas_kernels.reference.bitmap import EMPTY
from pallas_kernels.reference.partitions import with_serial


_BLOCK = 1024


def partition(indices, count, seeds, *, memory, interpret=False):
    """See `pallas_kernels.partition`."""
    size, parts, slots = indices.size, memory.parts, memory.slots
    seeds = jnp.asarray(seeds, jnp.uint32)
    waiting = (jnp.arange(size, dtype=jnp.int32) < count) & (indices >= 0)
    waiting = waiting.astype(jnp.int32)
    # Lanes that do not write have places of their own past the end.
    parallel = jnp.full(parts * slots + _BLOCK, EMPTY, jnp.int32)
    programs = -(-size // _BLOCK)
    for k in range(memory.hashes):
        two = seeds[jnp.array([0, k + 1])]
        (parallel,) = launch.launch(
            partition_write_kernel,
            programs,
            (indices, waiting, two, parallel),
            [jax.ShapeDtypeStruct(parallel.shape, jnp.int32)],
            in_place={3: 0},
            interpret=interpret,
            memory=memory,
        )
        (waiting,) = launch.launch(
            partition_verify_kernel,
            programs,
            (indices, waiting, two, parallel),
            [jax.ShapeDtypeStruct(waiting.shape, jnp.int32)],
            interpret=interpret,
            memory=memory,
        )
    parallel = parallel[: parts * slots].reshape(parts, slots)
    return with_serial(parallel, indices, waiting != 0, seeds[0], memory.serial)


def _own(indices_ref, waiting_ref, seeds_ref, memory):
    """This program's indices, whether they wait, and the slot of this round."""
    lane = launch.lanes(_BLOCK)
    inside = lane < indices_ref.shape[0]
    indices = launch.load(indices_ref, lane, inside, jnp.int32(0))
    waiting = inside & (launch.load(waiting_ref, lane, inside, jnp.int32(0)) != 0)
    part = hashing.place(indices, seeds_ref[0], memory.parts)
    slot = part * memory.slots + hashing.place(indices, seeds_ref[1], memory.slots)
    return lane, inside, indices, waiting, slot


def partition_write_kernel(indices_ref, waiting_ref, seeds_ref, _, parallel_ref, *, memory):
    """A program's waiting indices write where their slot is free."""
    own = _own(indices_ref, waiting_ref, seeds_ref, memory)
    lane, _inside, indices, waiting, slot = own
    found = launch.load(parallel_ref, slot, waiting, jnp.int32(0))
    free = waiting & (found == EMPTY)
    spare = memory.parts * memory.slots + lane % _BLOCK
    launch.store(parallel_ref, jnp.where(free, slot, spare), indices, free)


def partition_verify_kernel(
    indices_ref, waiting_ref, seeds_ref, parallel_ref, still_ref, *, memory
):
    """A program's waiting indices wait on unless they find themselves."""
    own = _own(indices_ref, waiting_ref, seeds_ref, memory)
    lane, inside, indices, waiting, slot = own
    found = launch.load(parallel_ref, slot, waiting, jnp.int32(EMPTY))
    launch.store(still_ref, lane, (waiting & (found != indices)).astype(jnp.int32), inside)
