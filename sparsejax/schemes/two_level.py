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

`Traffic` reports the outer axis, where bytes are dear, and the bytes sent inside apart.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax import wire
from sparsejax.errors import ArgumentError, AxisError
from sparsejax.schemes import base
from sparsejax.schemes.zen.zen import Zen
from sparsejax.units.ownership import StripedHash


# Another hash than a scheme's own: with the same one, the units of a part would nearly all
# have the same owner across hosts.
_INSIDE = StripedHash(seed=0x2C1B3C6D)


@dataclasses.dataclass(frozen=True)
class TwoLevel(base.Scheme):
    """Dense inside, a scheme across; the axis name is (outer, inner).

    Attributes:
        across: The scheme over the outer axis.
    """

    across: base.Scheme = Zen()

    def __post_init__(self):
        if not isinstance(self.across, base.Scheme) or isinstance(self.across, TwoLevel):
            raise ArgumentError(
                f"across must be a scheme for one level, got {self.across!r}."
            )
        if self.across.selects:
            raise ArgumentError(
                f"{type(self.across).__name__} chooses among what ranks have, and those of "
                "a host would hold parts of its sum: give sync two_level=False, to run it "
                "over both axes as one."
            )
        ownership = getattr(self.across, "ownership", None)
        if getattr(ownership, "follows_data", False):
            raise ArgumentError(
                f"{ownership!r} follows the data, and the ranks of a host hold "
                "different parts of them; use another ownership across hosts."
            )

    @property
    def keeps_residual(self):
        return self.across.keeps_residual

    @property
    def needs_ranks(self):
        return self.across.needs_ranks

    @property
    def wire_dtype(self):
        """The dtype of the values between hosts; None for that of the array."""
        return getattr(self.across, "wire_dtype", None)

    def init(self, like: Any, ranks: Any) -> Any:
        """See `Scheme.init`; `ranks` is a pair, outer and inner, or 1 if not known."""
        outer, inner = ranks if isinstance(ranks, tuple) else (ranks, 1)
        if like.size == 0:
            return self.across.init(like, outer)
        width = _INSIDE.over(like.shape[0], inner).width
        part = jax.ShapeDtypeStruct((width, *like.shape[1:]), like.dtype)
        return self.across.init(part, outer)

    def __call__(self, x, state, axis_name, *, present=None):
        del present
        outer, inner = two_axes(axis_name)
        if x.size == 0:
            return base.nothing_to_send(x, state, axis_name)
        base.check_units(x)
        layout = _INSIDE.over(x.shape[0], wire.ranks(inner))
        part = lax.broadcasted_iota(jnp.int32, (layout.ranks, 1), 0)
        units = layout.invert(part, lax.iota(jnp.int32, layout.width))
        parts = x.at[units].get(mode="fill", fill_value=0)
        mine, scattered = wire.reduce_scatter(parts, inner)
        done = self._across(x.dtype)(mine, state, outer)
        gathered, spread = wire.all_gather(done.total.astype(x.dtype), inner)
        total = layout.join(gathered)
        residual = done.residual
        if residual is not None:
            back = jnp.zeros((x.shape[0], *residual.shape[1:]), residual.dtype)
            own = units[wire.rank(inner)]
            residual = back.at[own].set(residual, mode="drop")
        traffic = wire.agree(done.traffic, outer)
        traffic = traffic._replace(inside=jnp.float32(scattered + spread))
        return base.Reduced(total, residual, done.state, traffic)

    def _across(self, dtype):
        """The scheme for a host's sums, which have float32 and travel in x's dtype."""
        across: Any = self.across
        fields = {field.name for field in dataclasses.fields(across)}
        if jnp.dtype(dtype).itemsize > 2 or "wire_dtype" not in fields:
            return across
        narrow = wire.travelling(dtype, self.wire_dtype)
        return dataclasses.replace(across, wire_dtype=narrow)

    def forecast(self, load):
        """What one rank would send to other hosts; `load` is its part of a host's sum."""
        return self.across.forecast(load)


def two_axes(axis_name: Any) -> tuple[wire.AxisName, wire.AxisName]:
    """The outer and the inner axis, or an error."""
    if isinstance(axis_name, str) or len(axis_name) != 2:
        raise AxisError(
            f"TwoLevel works over two axes, axis_name=(outer, inner), got {axis_name!r}."
        )
    return axis_name
