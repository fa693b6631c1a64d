"""DRAGONN's hash write in Pallas: one launch, one read of the gradient.

Whoever is large enough writes its index where it hashes to. Stores of 32 bits are not torn,
so of those that meet in a slot exactly one stays; nobody asks which.
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
    """A program's large elements write their index where it hashes to."""
    lane = launch.lanes(_BLOCK)
    inside = lane < x_ref.shape[0]
    x = launch.load(x_ref, lane, inside, jnp.zeros((), x_ref.dtype))
    large = inside & (jnp.abs(x) >= level_ref[0])
    to = hashing.place(lane, seed_ref[0], slots)
    launch.store(memory_ref, jnp.where(large, to, slots + lane % _BLOCK), lane, large)
