"""Two levels: a dense sum inside a host, a sparse scheme across hosts.

Zen, section 3.4: the links inside a host are fast, those between hosts are not. Over the
axes (outer, inner), with m ranks inside:

    inside  reduce-scatter: each rank adds up one of m parts of the dense array
    across  the scheme, over the outer axis, each rank with its part
    inside  all-gather of the parts

So each of a host's m links to the network carries an m-th, and a unit that several ranks
of a host have crosses once. The parts are a striped hash of the units, not ranges: ranges
would leave the ranks of a host as unevenly loaded as the gradient is skewed.

A host's sum is taken in float32 or wider and crosses in x's dtype, or a narrower one: so it
must fit that dtype, where a flat scheme asks it only of the numbers and of the total.

`Traffic` reports the outer axis, where bytes are dear, and the bytes sent inside
separately. It is that of this rank's part: who keeps it agrees on the largest of a host's,
once a step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError, AxisError
from sparsejax.schemes import base
from sparsejax.schemes.owners.host_rows import HostRows
from sparsejax.units.dense import Dense
from sparsejax.units.ownership.striped import StripedHash


# Another hash than a scheme's own: with the same one, the units of a part would nearly all
# have the same owner across hosts.
_INSIDE = StripedHash(seed=0x2C1B3C6D)


@dataclasses.dataclass(frozen=True)
class TwoLevel(base.Scheme):
    """Sums densely over the inner of two mesh axes, and by a scheme over the outer one.

    For hosts with fast links inside. Each device of a host sums an equal part of the array,
    or of the rows that its devices list, and exchanges that part with other hosts by the
    scheme. The axis name is a pair (outer, inner).

    Attributes:
        across: The scheme over the outer axis.

    Example:
        >>> hosts = sparsejax.schemes.BalancedParallelism()
        >>> tx = sparsejax.sync(sparsejax.schemes.TwoLevel(hosts), ("hosts", "devices"))

    References:
        Wang et al., Zen: Empowering Distributed Training with Sparsity-driven Data
        Synchronization, OSDI 2025, section 3.4
    """

    across: base.Scheme

    def __post_init__(self):
        if not isinstance(self.across, base.Scheme) or isinstance(self.across, TwoLevel):
            raise ArgumentError(
                f"across must be a scheme for one level, got {self.across!r}."
            )
        if isinstance(self.across, base.LossyScheme):
            raise ArgumentError(
                f"{type(self.across).__name__} leaves out a part of what each rank has, "
                "and the ranks of a host would have parts of its sum: give sync "
                "two_level=False, to run it over both axes as one."
            )
        # Of the values between hosts.
        object.__setattr__(self, "wire_dtype", self.across.wire_dtype)

    def init(self, like, wire):
        if wire is None:
            return self.across.init(like, None)
        outer, inner = (wire.along(axis) for axis in two_axes(wire.axis))
        if like.size == 0:
            return self.across.init(like, outer)
        width = _INSIDE.over(like.shape[0], inner.ranks).width
        part = jax.ShapeDtypeStruct((width, *like.shape[1:]), like.dtype)
        return self.across.init(part, outer)

    def __call__(self, x, state, wire):
        outer, inner = (wire.along(axis) for axis in two_axes(wire.axis))
        if x.size == 0:
            return base.nothing_to_send(x, state, wire)
        base.check_units(x)
        x = x.dense()
        layout = _INSIDE.over(x.shape[0], inner.ranks)
        part = lax.broadcasted_iota(jnp.int32, (layout.ranks, 1), 0)
        units = layout.invert(part, lax.iota(jnp.int32, layout.width))
        parts = x.at[units].get(mode="fill", fill_value=0)
        mine, scattered = inner.reduce_scatter(parts)
        # A host's sum has float32 or wider, and travels in x's dtype.
        across = outer.narrowed(x.dtype) if x.dtype.itemsize <= 2 else outer
        done = self.across(Dense(mine), state, across)
        gathered, spread = inner.all_gather(done.total.astype(x.dtype))
        total = layout.join(gathered)
        left = done.left
        if left is not None:
            back = jnp.zeros((x.shape[0], *left.shape[1:]), left.dtype)
            left = back.at[units[inner.rank]].set(left, mode="drop")
        traffic = done.traffic._replace(inside=jnp.float32(scattered + spread))
        return base.Reduced(total, left, done.state, traffic)

    def rows(self, tables, wire):
        """Listed rows as arrays: added up inside, then across; see `owners.host_rows`."""
        outer, inner = (wire.along(axis) for axis in two_axes(wire.axis))
        # Inside, rows travel in their own dtype.
        inner = dataclasses.replace(inner, dtype=None)
        return HostRows(self.across, _INSIDE, wire, outer, inner)(tables)

    def scatter(self, x, count, wire):
        """A piece is needed on one device: as across, over both axes as one."""
        return self.across.scatter(x, count, wire)

    def scatter_rows(self, tables, wire):
        return self.across.scatter_rows(tables, wire)

    def forecast(self, load):
        """Reckons what one rank sends to other hosts.

        Args:
            load: Its part of a host's sum: `Load.part`.
        """
        return self.across.forecast(load)


def two_axes(axis_name: Any) -> tuple[AxisName, AxisName]:
    """The outer and the inner axis, or an error."""
    if isinstance(axis_name, str) or len(axis_name) != 2:
        raise AxisError(
            f"TwoLevel works over two axes, axis_name=(outer, inner), got {axis_name!r}."
        )
    return axis_name
