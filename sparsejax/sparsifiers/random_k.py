"""Random-k: the same random elements on all ranks, so that no indices travel.

The places are drawn from the step by a hash that is one-to-one, so none comes twice and
ranks agree on them without a message; what goes over the wire is an all-reduce of k values.
Without a memory values are scaled by size / k, which makes the mean that of the whole
gradient; with one they go as they are, and the rest waits.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax.sparsifiers import base


@dataclasses.dataclass(frozen=True)
class RandomK(base.Selecting):
    """Elements drawn anew at every step, each as likely as any other."""

    shared = True

    def scale(self, size, draw):
        return size / self._of_this_shard(draw)

    def _of_this_shard(self, draw):
        return -(-draw.wanted // draw.shards)

    def select(self, x, state, draw, capacity):
        number = lax.iota(jnp.uint32, capacity)
        drawn = permuted(number, x.size, draw.seed).astype(jnp.int32)
        used = number.astype(jnp.int32) < self._of_this_shard(draw)
        return jnp.where(used, drawn, x.size), state


def permuted(numbers, size, seed):
    """Distinct numbers in [0, size) for distinct numbers in it; which, the seed says.

    Every step of the mixing is one-to-one on the numbers of so many bits. What falls
    outside is mixed again: so it comes back to a number inside that no other has.
    """
    width = max(int(size - 1).bit_length(), 1)
    mask = np.uint32((1 << width) - 1)

    def mixed(x):
        turn = seed
        for shift, factor in (
            (width // 2 + 1, 0x85EBCA6B),
            (width // 3 + 1, 0xC2B2AE35),
            (width // 2 + 1, 0x9E3779B1),
        ):
            x = x ^ (turn & mask)
            x = x ^ (x >> np.uint32(shift))
            x = (x * np.uint32(factor)) & mask
            turn = (turn << np.uint32(11)) | (turn >> np.uint32(21))
        return x ^ (x >> np.uint32(width // 2 + 1))

    inside = lambda x: x < np.uint32(size)
    return lax.while_loop(
        lambda x: ~jnp.all(inside(x)),
        lambda x: jnp.where(inside(x), x, mixed(x)),
        mixed(numbers),
    )
