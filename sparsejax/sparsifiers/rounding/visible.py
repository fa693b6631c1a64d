"""Visible: sends the elements that change a parameter after a cast to fewer bits.

Training keeps parameters in float32, but the next forward pass reads them in 16 bits: a
change of less than about a 256th of a parameter does not change it in bfloat16. With the
parameter p, its accumulated gradient or difference x, and the rate of the optimizer,

    sent = x where cast(p - rate x) and cast(p) have different bits    else 0

The other elements are sent as zeros, so a synchronization of non-zero elements, such as
`sparsejax.zen_sync`, sends only those that change parameters, exactly. Small changes add up
in the residual until they change the parameter. No element is rounded.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from sparsejax import arguments
from sparsejax.errors import ArgumentError
from sparsejax.sparsifiers import base


@dataclasses.dataclass(frozen=True)
class Visible(base.Rounding):
    """Sends the elements whose step would change the parameter in a narrow dtype.

    With p a parameter and x its accumulated gradient:

        sent = x    where cast(p - rate x) and cast(p) have different bits
               0    elsewhere

    Each rank decides by its own x. The optimizer's momentum is not considered. Elements are
    sent unrounded, and small ones add up in the residual until they change the parameter.
    `update` must be given the parameters.

    Attributes:
        density: Not used: the parameters decide how much is sent.
        dtype: The dtype in which the model reads the parameters.
        rate: The learning rate of the optimizer that follows.

    Example:
        >>> visible = sparsejax.sparsify(sparsejax.sparsifiers.Visible(rate=0.1))
        >>> tx = optax.chain(visible, sparsejax.zen_sync(), optax.sgd(0.1))

    References:
        Miahi and Belilovsky, Understanding and Exploiting Weight Update Sparsity for
        Communication-Efficient Distributed RL, arXiv 2602.03839
    """

    density: base.Density = 1.0
    dtype: Any = "bfloat16"
    rate: float = 1.0

    reads_params = True

    def __post_init__(self):
        super().__post_init__()
        if self.dtype is None:
            raise ArgumentError(
                "dtype must be the dtype in which parameters are read, such as 'bfloat16', "
                "got None."
            )
        arguments.check_dtype("dtype", self.dtype)
        arguments.check_positive("rate", self.rate)

    def rounded(self, x, draw):
        assert draw.param is not None
        own = draw.param.astype(x.dtype)
        # The bits are compared: in a comparison of numbers XLA may remove the cast.
        is_seen = self._bits(own - self.rate * x) != self._bits(own)
        return jnp.where(is_seen, x, 0)

    def _bits(self, x):
        narrow = x.astype(self.dtype)
        return lax.bitcast_convert_type(narrow, _UNSIGNED[narrow.dtype.itemsize])


_UNSIGNED = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
