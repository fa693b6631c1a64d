"""Recognizes equations that read whole rows, and elementwise ones that may precede them.

An elementwise operation, such as a cast, a sign or a scale, can be applied to the rows that
were read instead of to the table. So mixed precision, which casts all parameters first,
does not make gradients dense.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode
from jax.sharding import NamedSharding, PartitionSpec

from sparsejax.axes import axis_names
from sparsejax.errors import ArgumentError
from sparsejax.tracing import programs


@dataclasses.dataclass(frozen=True)
class Site:
    """A place in the program that reads rows.

    Attributes:
        leaf: The number of the leaf that is the table.
        height: The number of rows of the table.
        shape: The shape of the array that is read; inside scans, that of all turns stacked.
        axes: The axes of `shape` that are axes of a row. The others are those of the ids.
        dtype: The dtype of the table.
        varying: The mesh axes over which the array that is read varies.
        sharding: The sharding of the array that is read on an explicit mesh, under `jit`;
            None elsewhere.
    """

    leaf: int
    height: int
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: Any
    varying: frozenset[str]
    sharding: NamedSharding | None = None

    @property
    def ids_shape(self) -> tuple[int, ...]:
        """The shape of the ids of the rows."""
        return tuple(n for at, n in enumerate(self.shape) if at not in self.axes)

    @property
    def count(self) -> int:
        """The number of rows that are read, with repeats."""
        return math.prod(self.ids_shape)

    def over(self, turns: int) -> "Site":
        """Returns the site for all turns of a scan, with a leading axis for the turns."""
        axes = tuple(at + 1 for at in self.axes)
        sharding = self.sharding
        if sharding is not None:
            spec = PartitionSpec(None, *sharding.spec)
            sharding = NamedSharding(sharding.mesh, spec)
        shape = turns, *self.shape
        return dataclasses.replace(self, shape=shape, axes=axes, sharding=sharding)

    @property
    def ids_spec(self) -> PartitionSpec:
        """The partition spec of the ids, for a site that has a sharding."""
        assert self.sharding is not None
        pairs = enumerate(self.sharding.spec)
        return PartitionSpec(*(part for at, part in pairs if at not in self.axes))

    @property
    def batch(self) -> int:
        """The only axis of the ids that is sharded, for a site that has a sharding."""
        return next(at for at, part in enumerate(self.ids_spec) if part is not None)


def site_of(eqn: Any, leaf: int, dtype: Any) -> Site | None:
    """Returns the site of an equation that reads whole rows of its first input, or None."""
    axes = _ROW_AXES.get(eqn.primitive.name, lambda eqn: None)(eqn)
    if axes is None:
        return None
    table, read = eqn.invars[0].aval, eqn.outvars[0].aval
    varying = programs.varying(read)
    return Site(leaf, table.shape[0], tuple(read.shape), axes, dtype, varying)


def placed(
    site: Site,
    eqn: Any,
    jaxpr: Any,
    reduced: frozenset[str],
    outputs: Sequence[Any],
) -> Site | None:
    """Returns a site with its sharding on an explicit mesh; None if that is unsupported.

    It is supported if each device reads rows for its own share of the batch: exactly one
    axis of the ids is sharded, and no axis of a row. An output that stays reduced, such as
    a slice, has a dense gradient.

    Args:
        site: The site.
        eqn: The equation.
        jaxpr: The program that contains the equation.
        reduced: The mesh axes over which the table is reduced.
        outputs: The shardings of the program's outputs; see `programs.sharding_after`.

    Raises:
        ArgumentError: Devices read the same rows of a table that is reduced, and the rows
            read are not reduced. JAX 0.10 to 0.12 sum such a gradient over all of them.
    """
    found = programs.sharding_after(jaxpr, eqn.outvars[0], outputs)
    parts = () if found is None else tuple(found.spec.partitions)
    over = {name for part in parts for name in axis_names(part or ())}
    still = frozenset() if found is None else reduced & frozenset(found.spec.reduced)
    if missing := sorted(reduced - over - still):
        same = ", ".join(map(repr, missing))
        raise ArgumentError(
            f"value_and_grad: {programs.place(eqn)} reads a table that is cast over "
            f"{sorted(reduced)}, and what it reads is not sharded over {missing[0]!r}: JAX "
            "adds the gradient of each device up, though all have read the same. Shard the "
            "ids over all axes of the batch, table.at[ids].get(out_sharding=P("
            f"{tuple(sorted(reduced))}, ...)); or keep what all devices read reduced, "
            f"out_sharding=P(None, ..., reduced={{{same}}}); or name only the axes of the "
            "batch in sparsejax.local(params, axes)."
        )
    if found is None or still:
        return None
    parts = (*parts, *[None] * (len(site.shape) - len(parts)))
    own = [at for at, part in enumerate(parts) if part is not None]
    if len(own) != 1 or own[0] in site.axes:
        return None
    sharding = NamedSharding(found.mesh, PartitionSpec(*parts))
    return dataclasses.replace(site, sharding=sharding)


class Ids(NamedTuple):
    """The ids of the rows that an equation reads, of the shape `Site.ids_shape`.

    Attributes:
        read: int32; ids out of range are clamped as the equation clamps them, or are the
            height of the table where it returns a fill value.
        listed: int32, the ids of the gradient: the height of the table where the transpose
            of the equation drops the gradient. The same array as `read` unless the
            equation reads a clamped row and drops its gradient, as `table[ids]` does.
    """

    read: jax.Array
    listed: jax.Array


def ids_of(eqn: Any, operands: Sequence[jax.Array]) -> Ids:
    """Computes the ids of the rows that an equation reads, and those of its gradient.

    Args:
        eqn: The equation, which has a site.
        operands: Its operands except the table.
    """
    height, params = eqn.invars[0].aval.shape[0], eqn.params
    length = eqn.outvars[0].aval.shape[0]
    if eqn.primitive.name == "slice":
        return _all_listed(jnp.arange(length, dtype=jnp.int32) + params["start_indices"][0])
    if eqn.primitive.name == "dynamic_slice":
        start = _clipped(operands[0], height - length)
        return _all_listed(start + jnp.arange(length, dtype=jnp.int32))
    starts, reach = operands[0], params["slice_sizes"][0]
    numbers, mode = params["dimension_numbers"], params["mode"]
    first, others = starts[..., 0], starts[..., 1:]
    ids = _clipped(first, height - reach)
    # Starts along the other axes are in range only at 0, since whole rows are read.
    inside = (first >= 0) & _at_most(first, height - reach) & jnp.all(others == 0, -1)
    if not numbers.collapsed_slice_dims:
        # Several rows are read from each start; their axis precedes those of a row.
        at = numbers.offset_dims[0]
        column = [-1 if axis == at else 1 for axis in range(ids.ndim + 1)]
        steps = jnp.arange(reach, dtype=jnp.int32).reshape(column)
        ids, inside = jnp.expand_dims(ids, at) + steps, jnp.expand_dims(inside, at)
    if mode == GatherScatterMode.CLIP:
        return _all_listed(ids)
    listed = jnp.where(inside, ids, height)
    # For PROMISE_IN_BOUNDS XLA clamps ids of the read, and drops gradients out of range.
    return Ids(listed if mode == GatherScatterMode.FILL_OR_DROP else ids, listed)


def _all_listed(ids):
    return Ids(ids, ids)


def fill_of(eqn: Any, dtype: Any) -> Any:
    """Returns the fill value of an equation for ids out of range; None if it clamps."""
    if eqn.params.get("mode") != GatherScatterMode.FILL_OR_DROP:
        return None
    fill = eqn.params["fill_value"]
    return jnp.asarray(jnp.nan if fill is None else fill, dtype)


# --- Operations that commute with reading rows.

# Primitives that return their only input.
_SAME = {"copy", "copy_p", "name"}
# Primitives that return its numbers and change its sharding, or the axes it varies over.
_CASTS = {"mesh_cast", "pvary", "reshard", "sharding_constraint"}
_ONE_BY_ONE = {
    *("abs", "convert_element_type", "cos", "exp", "integer_pow", "log", "logistic", "neg"),
    *("reduce_precision", "rsqrt", "sign", "sin", "sqrt", "square", "tanh"),
}
_WITH_A_SCALAR = {"add", "div", "max", "min", "mul", "sub"}


def is_same(eqn: Any) -> bool:
    """Returns whether an equation returns its only input unchanged."""
    return eqn.primitive.name in _SAME and len(eqn.invars) == len(eqn.outvars) == 1


def is_cast(eqn: Any) -> bool:
    """Returns whether an equation changes only the sharding or varying axes of a value."""
    return eqn.primitive.name in _CASTS and len(eqn.invars) == len(eqn.outvars) == 1


def is_by_number(eqn: Any, at: int) -> bool:
    """Returns whether an equation is elementwise in its input `at`."""
    name, params = eqn.primitive.name, eqn.params
    if len(eqn.outvars) != 1 or eqn.outvars[0].aval.shape != eqn.invars[at].aval.shape:
        return False
    if name in _ONE_BY_ONE:
        return params.get("sharding") is None and programs.is_real(eqn.outvars[0])
    others = [v for k, v in enumerate(eqn.invars) if k != at]
    return name in _WITH_A_SCALAR and len(others) == 1 and others[0].aval.shape == ()


# --- The axes of a row in the array that an equation reads; None if it reads no whole rows.


def _of_gather(eqn):
    params, table = eqn.params, eqn.invars[0].aval.shape
    numbers, sizes = params["dimension_numbers"], tuple(params["slice_sizes"])
    known = {
        GatherScatterMode.CLIP,
        GatherScatterMode.FILL_OR_DROP,
        GatherScatterMode.PROMISE_IN_BOUNDS,
    }
    batched = numbers.operand_batching_dims or numbers.start_indices_batching_dims
    if batched or params["mode"] not in known or sizes[1:] != table[1:]:
        return None
    if numbers.start_index_map[:1] != (0,) or sizes[0] > table[0]:
        return None
    if numbers.collapsed_slice_dims not in ((), (0,)):
        return None
    return tuple(numbers.offset_dims[-len(table[1:]) :])


def _of_dynamic_slice(eqn):
    sizes, table = tuple(eqn.params["slice_sizes"]), eqn.invars[0].aval.shape
    return tuple(range(1, len(table))) if sizes[1:] == table[1:] else None


def _of_slice(eqn):
    read, table = eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape
    strides = eqn.params["strides"]
    whole = read[1:] == table[1:] and (strides is None or set(strides) <= {1})
    return tuple(range(1, len(table))) if whole else None


_ROW_AXES = {
    "dynamic_slice": _of_dynamic_slice,
    "gather": _of_gather,
    "slice": _of_slice,
}


# --- Ids of any integer dtype; the largest int8 or int16 may be less than the height.


def _at_most(ids, most):
    return ids <= most if most <= np.iinfo(ids.dtype).max else jnp.ones(ids.shape, bool)


def _clipped(ids, most):
    most = min(most, int(np.iinfo(ids.dtype).max))
    return lax.clamp(ids.dtype.type(0), ids, ids.dtype.type(most)).astype(jnp.int32)
