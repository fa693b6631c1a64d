"""One bit a number, and one scale: the sign, times the mean magnitude.

For comparison: it says how far selection is from rounding. What follows sends the rounded
numbers as numbers; the bits that they would need are not packed.
"""

import dataclasses

import jax.numpy as jnp

from sparsejax.sparsifiers import base


@dataclasses.dataclass(frozen=True)
class Sign(base.Rounding):
    """The sign of every element, with the mean magnitude of all; `density` is not used."""

    density: base.Density = 1.0

    def rounded(self, x, draw):
        whole = draw.total(jnp.asarray(x.size, x.dtype))
        return jnp.sign(x) * (draw.total(jnp.sum(jnp.abs(x))) / whole)
