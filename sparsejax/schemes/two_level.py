"""Two levels: a dense sum inside a host, a sparse scheme across hosts.

Zen, section 3.4: the links inside a host are fast, and those between hosts are slow. Over
the axes (outer, inner), with m ranks inside a host:

    inside  reduce-scatter: each rank adds up one of m parts of the dense array
    across  the scheme, over the outer axis, for each rank's part
    inside  all-gather of the parts

So each of a host's m links to the network carries an m-th of the array, and a unit that
several ranks of a host have is sent to other hosts once. The parts are a striped hash of
the units, not ranges: with ranges the loads of a host's ranks would be as uneven as the
gradient is skewed.

A host's sum is taken in float32 or wider, and sent to other hosts in x's dtype or a
narrower one. So the sum of each host must fit that dtype, where in a flat scheme only the
numbers and the total must. For a mean each rank divides its part before the all-gather.

`Traffic` reports the bytes on the outer axis, which are expensive, and the bytes inside a
host separately. It is the traffic of this rank's part. The transformation that keeps it in
its state takes the maximum over the ranks of a host, once a step.
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


# The seed differs from that of a scheme's own hash: with the same hash nearly all units of
# a part would have the same owner across hosts.
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
        # The dtype of values sent between hosts.
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

    def __call__(self, x, state, wire, mean=False):
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
        # A host's sum is float32 or wider, and is sent in x's dtype.
        across = outer.narrowed(x.dtype) if x.dtype.itemsize <= 2 else outer
        done = self.across(Dense(mine), state, across)
        total = wire.mean_of(done.total.astype(x.dtype), mean)
        gathered, spread = inner.all_gather(total)
        total = layout.join(gathered)
        left = done.left
        if left is not None:
            back = jnp.zeros((x.shape[0], *left.shape[1:]), left.dtype)
            left = back.at[units[inner.rank]].set(left, mode="drop")
        traffic = done.traffic._replace(inside=jnp.float32(scattered + spread))
        return base.Reduced(total, left, done.state, traffic)

    def rows(self, tables, wire, mean=False):
        """Sums listed rows inside hosts, then across hosts; see `owners.host_rows`."""
        outer, inner = (wire.along(axis) for axis in two_axes(wire.axis))
        # Inside, rows travel in their own dtype.
        inner = dataclasses.replace(inner, dtype=None)
        return HostRows(self.across, _INSIDE, wire, outer, inner, mean)(tables)

    def scatter(self, x, count, wire):
        """Scatters by the scheme over both axes as one, since one device needs a piece."""
        return self.across.scatter(x, count, wire)

    def scatter_rows(self, tables, wire):
        return self.across.scatter_rows(tables, wire)

    def forecast(self, load):
        """Forecasts what one rank sends to other hosts.

        Args:
            load: The load of the rank's part of its host's sum: `Load.part`.
        """
        return self.across.forecast(load)


def two_axes(axis_name: Any) -> tuple[AxisName, AxisName]:
    """Returns the outer and the inner axis; raises unless there are two."""
    if isinstance(axis_name, str) or len(axis_name) != 2:
        raise AxisError(
            f"TwoLevel works over two axes, axis_name=(outer, inner), got {axis_name!r}."
        )
    return axis_name
