"""Sign: rounds each element to its sign times the mean magnitude, one bit and one scale.

It is for comparison of selection with rounding only: the rounded elements are sent as
floating-point numbers, and not packed into bits.
"""

import dataclasses

import jax.numpy as jnp

from sparsejax.sparsifiers import base


@dataclasses.dataclass(frozen=True)
class Sign(base.Rounding):
    """Rounds each element to its sign times the mean magnitude of the array.

        sign(x_i) mean(|x|)

    For comparison only: the rounded elements are sent as floating-point numbers, not in one
    bit.

    Attributes:
        density: Not used: all elements are sent.

    Example:
        >>> signs = sparsejax.sparsify(sparsejax.sparsifiers.Sign())
        >>> tx = optax.chain(signs, sparsejax.zen_sync(), optax.sgd(0.1))

    References:
        Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression
        Schemes, ICML 2019
    """

    density: base.Density = 1.0

    def rounded(self, x, draw):
        elements = draw.over.add(jnp.asarray(x.size, x.dtype))
        return jnp.sign(x) * (draw.over.add(jnp.sum(jnp.abs(x))) / elements)
