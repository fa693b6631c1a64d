"""One bit an element and one scale: the sign, times the mean magnitude.

For comparison only: it shows how far selection is from rounding. The rounded elements
travel as floating-point numbers, not packed into bits.
"""

import dataclasses

import jax.numpy as jnp

from sparsejax.sparsifiers import base


@dataclasses.dataclass(frozen=True)
class Sign(base.Rounding):
    """Rounds to the sign times the mean magnitude of all; `density` is not used.

    Example:
        >>> signs = sparsejax.sparsify(sparsejax.sparsifiers.Sign())
        >>> tx = optax.chain(signs, sparsejax.zen_sync(), optax.sgd(0.1))
    """

    density: base.Density = 1.0

    def rounded(self, x, draw):
        elements = draw.over.add(jnp.asarray(x.size, x.dtype))
        return jnp.sign(x) * (draw.over.add(jnp.sum(jnp.abs(x))) / elements)
