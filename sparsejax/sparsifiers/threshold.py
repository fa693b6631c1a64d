"""A fixed threshold, for callers who know the scale of their gradients.

The number of selected elements is not known in advance, so `density` sets the capacity.
Larger selections are reduced to the largest elements that fit. Elements below the threshold
add up in the residual until they reach it.
"""

import dataclasses

from sparsejax import arguments
from sparsejax.sparsifiers import base
from sparsejax.units.selection import magnitudes


@dataclasses.dataclass(frozen=True)
class Threshold(base.ByMagnitude):
    """Selects all elements of at least a given magnitude, up to the capacity.

    If more elements are that large, the largest are selected. Smaller elements add up in
    the residual until they reach the threshold.

    Attributes:
        density: The capacity, as a share of the elements.
        value: The least magnitude, above 0.

    Example:
        >>> kind = sparsejax.sparsifiers.Threshold(density=0.05, value=1e-3)
        >>> large = sparsejax.sparsify(kind)
        >>> tx = optax.chain(large, sparsejax.zen_sync(), optax.sgd(0.1))
    """

    value: float = 1e-3

    def __post_init__(self):
        super().__post_init__()
        arguments.check_positive("value", self.value)

    def level(self, x, state, draw):
        del draw
        return magnitudes.key_of(self.value, x.dtype), state
