"""The parameters that a rank reads: `sparsejax.local`.

Nothing is sent. The parameters of a script are the anchor, equal on all ranks. The offset
of a rank from it is in the state of `sparsejax.local_steps`, and is added here:

    parameters of this rank = anchor + offset

in float32 or wider, rounded to the dtype of the parameter.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sparsejax import axes
from sparsejax.axes import AxisName, axis_names
from sparsejax.errors import AxisError, StateError, missing_axis
from sparsejax.rounds.state import find_state
from sparsejax.state import tree
from sparsejax.state.per_rank import RankState, check_ranks
from sparsejax.state.per_replica import PerReplica, mesh_here
from sparsejax.wire.collectives import Wire


_CALL = "sparsejax.local"

AnyMesh = Mesh | AbstractMesh


def local(params: Any, axis_name: AxisName | None = None, opt_state: Any = None) -> Any:
    """Makes parameters vary over the mesh axis, so that their gradients stay local.

    Use it on the parameters before `jax.grad`, inside `jax.shard_map`. Without it
    `jax.grad` sums the gradient densely over the ranks, where `check_vma` is on. It sends
    nothing. Where `check_vma` is off, and outside `shard_map`, it is the identity. So a
    loss may use it for the carry of a scan, `jax.lax.scan(cell, sparsejax.local(zeros),
    xs)`, and still run on one device.

    Under `jit` on an explicit mesh, name all axes over which the batch is sharded. Arrays
    are then cast to *reduced* over these, and gradients are *unreduced*: partial sums, for
    which nothing was sent. Shards over one of these axes are gathered, as in the forward
    pass of FSDP.

    With the state of `sparsejax.local_steps`, the result is this rank's parameters: the
    anchor plus this rank's offset. Under `jit` that is a `PerReplica` for each parameter,
    the parameters of all ranks stacked, which `sparsejax.per_replica` takes. A state
    without local steps changes nothing.

    Args:
        params: The parameters.
        axis_name: The mesh axis over which gradients stay local; the only manual one if
            None.
        opt_state: The optimizer's state, if `sparsejax.local_steps` is in it.

    Returns:
        The same values, typed as varying or as reduced; or this rank's parameters.

    Raises:
        AxisError: No axis is named where there are several, or the one that is named is
            none here.

    Example:
        >>> def local_grads(params, batch):
        ...     grads = jax.grad(loss_fn)(sparsejax.local(params), batch)
        ...     return sparsejax.all_reduce(grads, reduce="mean")
        >>> grads = jax.jit(jax.shard_map(
        ...     local_grads, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
        ... ))(params, batch)

    See Also:
        `sparsejax.per_replica`: local gradients under `jit` on meshes with Auto axes.
    """
    state = None if opt_state is None else find_state(opt_state, _CALL)
    if state is None or state.offset is None:
        return _local(params, axis_name)
    axes.check_axis_name(axis_name, _CALL)
    offset = state.offset
    named = axis_names(offset.axis_name)
    if axis_name is not None and axis_names(axis_name) != named:
        raise AxisError(
            f"{_CALL} was given the axis {axis_name!r}, and a state of local steps over "
            f"{offset.axis_name!r}: name that one."
        )
    if is_inside(offset.axis_name):
        check_ranks(offset, Wire(offset.axis_name).ranks)
        return moved(_local(params, offset.axis_name), offset)
    mesh = axes.outside_of((params, offset), None) or mesh_here(None, named, _CALL)

    def node(x, row):
        spec = spec_of(x)
        value = moved_stack(x, row, spec, offset.axis_name, mesh)
        return PerReplica(value, offset.axis_name, spec, mesh)

    return _mapped(node, params, offset)


def _local(params: Any, axis_name: AxisName | None) -> Any:
    """Makes parameters vary over the axis, or casts them to reduced."""
    axes.check_axis_name(axis_name, _CALL)
    if axes.manual_axes():
        axis_name = axes.resolve(axis_name, _CALL)
        if not axes.is_checking(axis_name):
            return params
        return axes.as_varying(params, frozenset(axis_names(axis_name)))
    if axis_name is None:
        return params
    if axes.outside_of(params, None) is None:
        return params
    names = frozenset(axis_names(axis_name))
    return jax.tree.map(lambda x: _as_reduced(x, names), params)


def _as_reduced(x, names):
    """Casts an array on an explicit mesh to reduced, so that its gradient is unreduced."""
    mesh = axes.mesh_of(x)
    if mesh is None:
        return x
    if missing := sorted(names - {*mesh.axis_names}):
        raise missing_axis(_CALL, missing[0], mesh.axis_names)
    spec = jax.typeof(x).sharding.spec
    parts = (axis_names(part or ()) for part in spec.partitions)
    left = (tuple(name for name in part if name not in names) or None for part in parts)
    wanted = PartitionSpec(*left, reduced=names | frozenset(spec.reduced))
    return jax.reshard(x, NamedSharding(mesh, wanted))


def is_inside(axis_name: AxisName) -> bool:
    """Returns whether a single rank is traced: in `shard_map`, or `vmap` with a name."""
    if axes.manual_axes():
        return True
    try:
        return lax.axis_size(axis_name) > 0
    except NameError:
        return False


def moved(params: Any, offset: RankState) -> Any:
    """Returns this rank's parameters, anchor plus offset, inside `shard_map`."""
    one = lambda x, row: (x.astype(row.dtype) + row[0]).astype(x.dtype)
    return _mapped(one, params, offset)


def moved_stack(
    x: jax.Array, row: jax.Array, spec: PartitionSpec, axis_name: AxisName, mesh: AnyMesh
) -> jax.Array:
    """Returns one parameter of all ranks, [ranks, ...], under `jit`.

    Args:
        x: The anchor.
        row: The offsets, [ranks, ...].
        spec: The PartitionSpec of the parameter.
        axis_name: The axis of the ranks.
        mesh: The mesh.
    """
    wide = stacked(x.astype(row.dtype), len(row), spec, axis_name, mesh)
    return (wide + row).astype(x.dtype)


def stacked(
    x: jax.Array, ranks: int, spec: PartitionSpec, axis_name: AxisName, mesh: AnyMesh
) -> jax.Array:
    """Broadcasts an array to [ranks, ...], under `jit`; see `moved_stack`."""
    shape = (ranks, *x.shape)
    if AxisType.Explicit not in mesh.axis_types:
        return jnp.broadcast_to(x, shape)
    there = NamedSharding(mesh, PartitionSpec(axis_name, *spec))
    return lax.broadcast_in_dim(x, shape, range(1, x.ndim + 1), out_sharding=there)


def spec_of(x: jax.Array) -> PartitionSpec:
    """Returns the spec of a parameter by its type; `P()` without Explicit axes."""
    mesh = axes.mesh_of(x)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return PartitionSpec()
    return PartitionSpec(*jax.typeof(x).sharding.spec.partitions)


def _mapped(one, params, offset):
    """Maps `one` over parameters and their offsets; masked leaves are unchanged."""
    leaves, structure = jax.tree.flatten(params, is_leaf=tree.is_masked)
    try:
        rows = structure.flatten_up_to(offset.value)
    except ValueError as error:
        raise StateError(
            f"{_CALL}: the state of sparsejax.local_steps was made for other parameters: "
            f"{str(error).splitlines()[0]} Make it with those that are trained: "
            "sparsejax.init(tx, params, mesh)."
        ) from None
    pairs = zip(leaves, rows, strict=True)
    return structure.unflatten(
        [x if tree.is_masked(row) or tree.is_masked(x) else one(x, row) for x, row in pairs]
    )
