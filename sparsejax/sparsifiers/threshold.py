"""A fixed threshold: what is as large goes. The caller knows the scale of the gradients.

How many go is not known before, so `density` says for how many there is room. The rest
waits, and so do the smaller ones until enough has come together.
"""

import dataclasses

from sparsejax import errors
from sparsejax.sparsifiers import base
from sparsejax.units import magnitudes


@dataclasses.dataclass(frozen=True)
class Threshold(base.ByMagnitude):
    """All elements of at least a magnitude, as many as there is room for.

    Attributes:
        density: The share of elements for which there is room.
        value: The least magnitude, above 0.
    """

    value: float = 1e-3

    def __post_init__(self):
        super().__post_init__()
        errors.check_positive("value", self.value)

    def level(self, x, state, draw):
        del draw
        return magnitudes.key_of(self.value, x.dtype), state
