"""DRAGONN's hash write in Pallas: one launch, one read of the gradient.

Whoever is large enough writes its index where it hashes to. Stores of 32 bits are not torn,
so of those that meet in a slot exactly one stays; nobody asks which.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import hashing
from pallas_kernels.pallas import launch
from pallas_kernels.reference.indices import EMPTY


_BLOCK = 1024


def threshold_hash(x, threshold, seed, slots, *, interpret=False, block=_BLOCK):
    """See `pallas_kernels.threshold_hash`."""
    level = jnp.asarray(threshold, x.dtype).reshape(1)
    seed = jnp.asarray(seed, jnp.uint32).reshape(1)
    memory = jnp.full(slots + block, EMPTY, jnp.int32)
    (memory,) = launch.launch(
        functools.partial(_kernel, block=block, slots=slots, size=x.size),
        "threshold_hash",
        -(-x.size // block),
        (x, level, seed, memory),
        [jax.ShapeDtypeStruct(memory.shape, jnp.int32)],
        in_place={3: 0},
        interpret=interpret,
    )
    return memory[:slots]


def _kernel(x_ref, level_ref, seed_ref, _, memory_ref, *, block, slots, size):
    lane = launch.lanes(block)
    inside = lane < size
    x = launch.load(x_ref, lane, inside, jnp.zeros((), x_ref.dtype))
    large = inside & (jnp.abs(x) >= level_ref[0])
    to = hashing.place(lane, seed_ref[0], slots)
    launch.store(memory_ref, jnp.where(large, to, slots + lane % block), lane, large)
