"""Random-k: the same random elements on all ranks, so that no indices are sent.

The indices are a permutation that is seeded by the step, so they are distinct, and ranks
agree on them without a message. On the wire is an all-reduce of k values. Without a memory,
values are scaled by size / k, so that their expectation is the whole gradient; with a
memory they are sent unchanged, and the other elements are the residual.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsejax.sparsifiers import base


@dataclasses.dataclass(frozen=True)
class RandomK(base.Selector):
    """Selects k random elements, the same on all ranks, and others in each step.

    All elements have the same probability. No indices are sent: an all-reduce sums k
    values. Without a memory the values are scaled by size / k, so that their expectation is
    the gradient. A NaN or an infinity, too, is sent only when its index is drawn, on
    average after 1 / density steps.

    Attributes:
        density: The share of elements to send, k of the size: a number, a `Warmup` or a
            `Schedule`.

    Example:
        >>> random = sparsejax.sparsify(sparsejax.sparsifiers.RandomK(0.01))
        >>> tx = optax.chain(random, sparsejax.zen_sync(), optax.sgd(0.1))

    References:
        Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, NeurIPS 2018
    """

    shared = True

    def scale(self, size, draw):
        return size / draw.of_shard

    def select(self, x, state, draw, capacity):
        number = lax.iota(jnp.uint32, capacity)
        drawn = permuted(number, x.size, draw.seed).astype(jnp.int32)
        used = number.astype(jnp.int32) < draw.of_shard
        return jnp.where(used, drawn, x.size), state


def permuted(numbers, size, seed):
    """Permutes numbers in [0, size), by a permutation that is drawn from a seed.

    Every step of the mixing is a permutation of the numbers of a fixed bit width. A result
    outside [0, size) is mixed again until it is inside, where it is distinct from all other
    results.
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
