"""The dense all-reduce, which sends every zero: the yardstick and the fallback.

On the wire: `lax.psum`, 2 (n-1)/n times the bytes of x. Numbers of 16 bits, or narrowed to
16 bits by `wire_dtype`, take the same bytes but are added up in float32: parts are
exchanged by an all-to-all, each rank adds up its own, and the sums are gathered.

On TPUs it is also what sums single numbers, whatever scheme was asked for (`suited`).
"""

import dataclasses

import jax

from sparsejax import arguments, errors
from sparsejax.axes import policy
from sparsejax.schemes import base
from sparsejax.units.units import Units
from sparsejax.wire.collectives import Wire


@dataclasses.dataclass(frozen=True)
class AllReduce(base.Scheme):
    """Sums arrays densely, zeros and all: `jax.lax.psum`.

    Numbers of 16 bits are sent as such, and summed in float32.

    Attributes:
        wire_dtype: The dtype of the values on the wire; that of x if None.

    Example:
        >>> tx = sparsejax.sync(sparsejax.schemes.AllReduce(wire_dtype="bfloat16"))
    """

    wire_dtype: jax.typing.DTypeLike | None = None

    def __post_init__(self):
        arguments.check_dtype("wire_dtype", self.wire_dtype)

    def __call__(self, x, state, wire):
        return base.sum_densely(x, state, wire.narrowed(self.wire_dtype))

    def forecast(self, load):
        return load.all_reduce(self.wire_dtype)


def suited(
    scheme: base.Scheme, x: Units, name: str, wire: Wire, dense: bool = False
) -> base.Scheme:
    """The scheme that sums some units on the platform that is traced for.

    Where single numbers are not worth listing, that is a dense sum, and a warning says so.
    A lossy scheme stays, with a warning of its own: a dense sum would train otherwise.
    Entries that all ranks have in common stay, too: of them values alone are sent.

    Args:
        scheme: The scheme that was asked for.
        x: The units.
        name: Of their leaf, or bucket.
        wire: The ranks.
        dense: Whether a dense sum was asked for.
    """
    if dense and not isinstance(scheme, AllReduce):
        return AllReduce(scheme.wire_dtype)
    is_listed = len(x.shape) == 1 and wire.ranks > 1 and not x.shared
    if policy().numbers or isinstance(scheme, AllReduce) or not is_listed:
        return scheme
    what = f"{type(scheme).__name__} was to sum {name!r}, {x.shape[0]:,} single numbers, "
    if isinstance(scheme, base.LossyScheme):
        errors.warn_of_platform(
            "selected numbers",
            f"{what}and does: but a TPU reads and writes selected numbers one after "
            "another, which takes longer than to send all of them. Sum such leaves "
            "densely, by sparsejax.dense_sync() or a rule 'dense'.",
        )
        return scheme
    errors.warn_of_platform(
        "listed numbers",
        f"{what}and they are summed densely: a TPU reads and writes listed numbers one "
        "after another, which takes longer than to send all of them. So no bytes are saved "
        "here. Say so by a rule 'dense' for such leaves, or by sparsejax.dense_sync(). "
        "Rows of tables are sent sparsely, by a rule 'row' or as RowGrads.",
    )
    return AllReduce(scheme.wire_dtype)
