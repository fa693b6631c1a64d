"""The dense all-reduce, which sends zeros too: the baseline and the fallback.

On the wire: `lax.psum`, 2 (n-1)/n times the bytes of x. Numbers of 16 bits, or narrowed to
16 bits by `wire_dtype`, take the same bytes but are added up in float32: parts are
exchanged by an all-to-all, each rank adds up its own part, and the sums are gathered.

On TPUs single numbers are summed by it, unless the scheme is lossy or the units are shared
by all ranks: see `or_dense.suited`.
"""

import dataclasses

import jax

from sparsejax import arguments
from sparsejax.schemes import base


@dataclasses.dataclass(frozen=True)
class AllReduce(base.Scheme):
    """Sums arrays densely, zeros and all: `jax.lax.psum`.

    Numbers of 16 bits are sent as such, and summed in float32.

    Attributes:
        wire_dtype: The dtype of the values on the wire; that of x if None.

    Example:
        >>> tx = sparsejax.sync(sparsejax.schemes.AllReduce(wire_dtype="bfloat16"))
    """

    is_dense = True
    wire_dtype: jax.typing.DTypeLike | None = None

    def __post_init__(self):
        arguments.check_dtype("wire_dtype", self.wire_dtype)

    def __call__(self, x, state, wire):
        return base.sum_densely(x, state, wire.narrowed(self.wire_dtype))

    def forecast(self, load):
        return load.all_reduce(self.wire_dtype)
