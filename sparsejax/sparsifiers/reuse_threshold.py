"""Threshold reuse: the threshold of exact top-k, computed once in a number of steps.

Gradients change slowly, so a threshold selects about as many elements in the next step.
After each step it is changed by about one per cent if it selected fewer than 2/3 k or more
than 5/4 k elements. So most steps read the array only once, to select, without computing a
threshold. Ok-Topk (section 3.1.3) is built on it.
"""

import dataclasses

import jax.numpy as jnp

from sparsejax import arguments, branches
from sparsejax.sparsifiers import base
from sparsejax.units.selection import magnitudes


@dataclasses.dataclass(frozen=True)
class ReuseThreshold(base.ByMagnitude):
    """Selects all elements that reach a threshold, which was computed some steps before.

    The threshold of exact top-k is computed at every `every`-th step. After each other step
    it is multiplied or divided by `step` if it selected more than 5/4 k or fewer than 2/3 k
    elements.

    Attributes:
        density: The share of elements to send, k of the size: a number, a `Warmup` or a
            `Schedule`.
        every: The number of steps after which the threshold is computed exactly.
        step: The factor of a correction, above 1.

    Example:
        >>> reuse = sparsejax.sparsify(sparsejax.sparsifiers.ReuseThreshold(0.01, every=16))
        >>> tx = optax.chain(reuse, sparsejax.zen_sync(), optax.sgd(0.1))

    References:
        Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP
        2022, section 3.1.3
    """

    every: int = 32
    step: float = 1.012

    def __post_init__(self):
        super().__post_init__()
        arguments.check_whole("every", self.every, 1)
        arguments.check_positive("step", self.step, 1)

    def init(self, size, dtype):
        return jnp.zeros((), dtype)

    @property
    def room(self):
        return 1.25

    def level(self, x, state, draw):
        def exact():
            key = magnitudes.threshold(x, draw.wanted, draw.seed, draw.over)
            return magnitudes.magnitude_of(key, x.dtype)

        reused = lambda: state.astype(x.dtype)
        threshold = branches.cond(draw.step % self.every == 0, exact, reused)
        return magnitudes.key_of(threshold, x.dtype), threshold

    def after(self, state, count, draw):
        fewer, more = 3 * count < 2 * draw.wanted, 4 * count > 5 * draw.wanted
        moved = jnp.where(
            fewer, state / self.step, jnp.where(more, state * self.step, state)
        )
        # A NaN or infinite threshold would select no finite element until the next exact
        # one. It is replaced by zero, which selects all non-zero elements, and of these the
        # largest that fit.
        return jnp.where(jnp.isfinite(moved), moved, 0)
