"""Striding: every s-th element, the same on all ranks, so that no indices are sent.

The first index is the number of the step modulo s, for every leaf: in s steps each element
is sent exactly once. On the wire is an all-reduce of k values. Without a memory, values are
scaled by s, since only one step in s sends them; with a memory they are sent unchanged, and
the other elements are the residual.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from sparsejax.sparsifiers import base


@dataclasses.dataclass(frozen=True)
class Striding(base.Selector):
    """Selects every s-th element, the same on all ranks, from another start in each step.

        s = ceil(size / k)    start = step mod s

    So each element is sent once in s steps, a NaN or an infinity too. No indices are sent:
    an all-reduce sums k values. Without a memory the values are scaled by s.

    Attributes:
        density: The share of elements to send, k of the size: a number, a `Warmup` or a
            `Schedule`.

    Example:
        >>> striding = sparsejax.sparsify(sparsejax.sparsifiers.Striding(0.1))
        >>> tx = optax.chain(striding, sparsejax.zen_sync(), optax.sgd(0.1))

    References:
        From et al., DeToNATION: Decoupled Torch Network-Aware Training on Interlinked
        Online Nodes, arXiv 2502.06728
    """

    shared = True

    def scale(self, size, draw):
        return self._stride(size, draw)

    def _stride(self, size, draw):
        return -(-size // draw.of_shard)

    def select(self, x, state, draw, capacity):
        stride = self._stride(x.size, draw)
        first = draw.step % stride
        number = lax.iota(jnp.int32, capacity)
        used = number < -((first - x.size) // stride)
        return jnp.where(used, number * stride + first, x.size), state
