"""What the library needs of the typing rules of `shard_map`; the casts are in `types`."""

import jax
from jax import lax

from pallas_kernels.types import (
    as_invarying,
    as_varying as as_varying,
    varying_axes as varying_axes,
)


AxisName = str | tuple[str, ...]


def axis_names(axis_name: AxisName) -> tuple[str, ...]:
    """Returns the axis name, or names, as a tuple."""
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def is_checking(axis_name: AxisName) -> bool:
    """Returns whether values carry types that say over which axes they vary."""
    names = axis_names(axis_name)
    return all(name in varying_axes(lax.axis_index(name)) for name in names)


def manual_axes() -> tuple[str, ...]:
    """Returns the axes that are manual where this is called."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def assume_same(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Declares x equal on all ranks of an axis; the caller has made sure that it is."""
    return as_invarying(x, frozenset(axis_names(axis_name)))
