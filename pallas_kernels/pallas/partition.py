"""Algorithm 1 of Zen in Pallas, bulk-synchronous.

The paper's threads write their index to a free slot, read it back, and own the slot if they
find themselves. In one launch that loses indices. Let A and B try the same free slot. A
reads it as free; B reads it as free, writes, reads itself back and is done; then A
overwrites B, reads itself back and is done, too. B is in no memory, and no thread knows: of
the 142 interleavings of two threads, 16 end so.

Here each round is two launches, which avoids that, because the end of a launch is a barrier
for the whole grid and makes all its writes visible:

    write    an index that waits is written if its slot was empty *before the launch*
    verify   an index that waits reads its slot, and stops waiting if it finds itself

Between the two there are no writes. A slot that was full before the write is not changed,
so its index, which was verified in an earlier round, is never lost. A slot that was empty
contains, after the barrier, one of the indices written there (stores of 32 bits are not
torn), and `verify` gives the slot to exactly that index: it finds itself, and every other
index finds another one and still waits. So after every round each index is either in one
slot or waiting, never both and never neither. After the last round, the indices that wait
go to the serial memories by rank and select, without atomic operations.

The state before the launch is not copied. The slot is read in the launch that writes it, in
place: a thread that reads another index instead of the empty slot does not write, and
waits; one that still reads it as empty overwrites the other index, whose thread finds that
out in `verify`. Either way the argument above holds.
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
    # Lanes that do not write have distinct places past the end.
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
    """Returns this program's lanes and indices, which wait, and their slots."""
    lane = launch.lanes(_BLOCK)
    inside = lane < indices_ref.shape[0]
    indices = launch.load(indices_ref, lane, inside, jnp.int32(0))
    waiting = inside & (launch.load(waiting_ref, lane, inside, jnp.int32(0)) != 0)
    part = hashing.place(indices, seeds_ref[0], memory.parts)
    slot = part * memory.slots + hashing.place(indices, seeds_ref[1], memory.slots)
    return lane, inside, indices, waiting, slot


def partition_write_kernel(indices_ref, waiting_ref, seeds_ref, _, parallel_ref, *, memory):
    """Writes waiting indices to their slots, where these are free, in each program."""
    own = _own(indices_ref, waiting_ref, seeds_ref, memory)
    lane, _inside, indices, waiting, slot = own
    found = launch.load(parallel_ref, slot, waiting, jnp.int32(0))
    free = waiting & (found == EMPTY)
    spare = memory.parts * memory.slots + lane % _BLOCK
    launch.store(parallel_ref, jnp.where(free, slot, spare), indices, free)


def partition_verify_kernel(
    indices_ref, waiting_ref, seeds_ref, parallel_ref, still_ref, *, memory
):
    """Keeps indices waiting that do not find themselves in their slot, in each program."""
    own = _own(indices_ref, waiting_ref, seeds_ref, memory)
    lane, inside, indices, waiting, slot = own
    found = launch.load(parallel_ref, slot, waiting, jnp.int32(EMPTY))
    launch.store(still_ref, lane, (waiting & (found != indices)).astype(jnp.int32), inside)
