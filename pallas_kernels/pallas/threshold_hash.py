"""DRAGONN's hash write in Pallas: one launch, one read of the gradient.

Each element that is large enough writes its index to the slot of its hash. Stores of 32
bits are not torn, so of several indices written to one slot exactly one remains, any of
them.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import hashing
from pallas_kernels.pallas import launch
from pallas_kernels.reference.bitmap import EMPTY


_BLOCK = 1024


def threshold_hash(x, threshold, seed, slots, *, interpret=False):
    """See `pallas_kernels.threshold_hash`."""
    level = jnp.asarray(threshold, x.dtype).reshape(1)
    seed = jnp.asarray(seed, jnp.uint32).reshape(1)
    memory = jnp.full(slots + _BLOCK, EMPTY, jnp.int32)
    (memory,) = launch.launch(
        threshold_hash_kernel,
        -(-x.size // _BLOCK),
        (x, level, seed, memory),
        [jax.ShapeDtypeStruct(memory.shape, jnp.int32)],
        in_place={3: 0},
        interpret=interpret,
        slots=slots,
    )
    return memory[:slots]


def threshold_hash_kernel(x_ref, level_ref, seed_ref, _, memory_ref, *, slots):
    """Writes the indices of large elements to the slots of their hashes in each program."""
    lane = launch.lanes(_BLOCK)
    inside = lane < x_ref.shape[0]
    x = launch.load(x_ref, lane, inside, jnp.zeros((), x_ref.dtype))
    large = inside & (jnp.abs(x) >= level_ref[0])
    to = hashing.place(lane, seed_ref[0], slots)
    launch.store(memory_ref, jnp.where(large, to, slots + lane % _BLOCK), lane, large)
