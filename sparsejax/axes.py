"""Mesh axes: the axis to sum over, and whether a gradient is still local.

Under `jax.shard_map` with `check_vma=True`, `jax.grad` with respect to a replicated
parameter contains a dense psum: the gradient is the sum already, so a sparse sum would save
nothing. Its type shows this: it does not vary over the axis. With `check_vma=False` types
show nothing, and the gradient is local; nothing can be checked there.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.types import (
    as_invarying,
    as_varying as as_varying,
    varying_axes as varying_axes,
)
from sparsejax.errors import (
    AlreadySummedError,
    ArgumentError,
    AxisError,
    needs_ranks,
)


AxisName = str | tuple[str, ...]


def axis_names(axis_name: AxisName) -> tuple[str, ...]:
    """Returns the axis name, or names, as a tuple."""
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def check_axis_name(axis_name: Any, what: str, hint: str = "") -> None:
    """Raises unless `axis_name` is the name of a mesh axis, a tuple of names, or None.

    Args:
        axis_name: The argument that the user passed.
        what: The call as the user wrote it, for the message.
        hint: What to write instead, for the message. Replaced if a mesh or an optax
            transformation was passed.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    are_names = names and all(isinstance(name, str) for name in names)
    if axis_name is None or (are_names and len(set(names)) == len(names)):
        return
    if isinstance(axis_name, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        given = f"a {type(axis_name).__name__}"
        hint = f"Name its axis, axis_name={axis_name.axis_names[0]!r}"
        hint += "." if len(axis_name.axis_names) == 1 else " (or another, or a pair)."
    elif hasattr(axis_name, "init") and hasattr(axis_name, "update"):
        given = "an optax transformation"
        hint = "Put it after the synchronization: optax.chain(sparsejax.zen_sync(), tx)."
    elif isinstance(axis_name, str | tuple | int):
        given = repr(axis_name)
    else:
        given = f"a {type(axis_name).__name__}"
    raise ArgumentError(
        f"{what}: axis_name must be the name of a mesh axis, such as 'data', two "
        f"different names, or None for the only one, got {given}. {hint}".rstrip()
    )


def is_checking(axis_name: AxisName) -> bool:
    """Returns whether the types of values say over which axes they vary (`check_vma`)."""
    names = axis_names(axis_name)
    return all(name in varying_axes(lax.axis_index(name)) for name in names)


def manual_axes() -> tuple[str, ...]:
    """Returns the axes that are manual where this is called."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def further_axes() -> tuple[str, ...]:
    """Returns the axes of size above one that the enclosing `shard_map` leaves to XLA."""
    mesh, manual = jax.sharding.get_abstract_mesh(), manual_axes()
    left = [name for name in mesh.axis_names if name not in manual and mesh.shape[name] > 1]
    return tuple(left) if manual else ()


def hint_of_whole() -> str:
    """Returns a hint for messages, if a state is sharded but the leaves here are whole.

    The hint is empty if all axes of the mesh are manual.
    """
    further = further_axes()
    if not further:
        return ""
    return (
        f"Here {further[0]!r} is no manual axis (axis_names of jax.shard_map leaves it "
        "out), so leaves are whole; a state that was made with param_specs is of shards. "
        "Make it without: sparsejax.init(tx, params, mesh, axis_name) keeps the sharding "
        "of the parameters. Or make all axes manual, by leaving axis_names out: then each "
        "rank sends its shard. "
    )


def all_manual(function: Callable[..., Any], axis_name: AxisName) -> Callable[..., Any]:
    """Wraps a function of pytrees so that it runs with all axes of the mesh manual.

    `axis_names=` of `jax.shard_map` leaves the other axes to XLA, which would insert its
    own collectives into branches and loops that ranks take independently: a deadlock. So
    the operands are gathered over these axes first, and all devices along them compute the
    same.

    Args:
        function: Takes pytrees of arrays and returns pytrees of arrays.
        axis_name: The axis of the ranks.
    """
    further = further_axes()
    if not further:
        return function
    mapped = jax.shard_map(
        function,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        axis_names=set(further),
        check_vma=is_checking(axis_name),
    )
    return lambda *operands: mapped(*jax.tree.map(unsharded, operands))


def unsharded(x: jax.Array) -> jax.Array:
    """Replicates x over the mesh of its type, if it has one.

    JAX refuses slices of a dimension sharded over an Explicit axis unless their parts are
    even. On Auto axes XLA replicates where it has to.
    """
    mesh = mesh_of(x)
    return x if mesh is None else jax.reshard(x, NamedSharding(mesh, PartitionSpec()))


def sharded_as(x: jax.Array, other: jax.Array) -> jax.Array:
    """Reshards x like `other`, if `other` is sharded and has the same shape."""
    sharding = jax.typeof(other).sharding
    is_whole = all(part is None for part in sharding.spec)
    return x if is_whole or x.shape != other.shape else jax.reshard(x, sharding)


def assume_same(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Casts x to invarying over an axis; the caller guarantees that all ranks are equal."""
    return as_invarying(x, frozenset(axis_names(axis_name)))


def resolve(axis_name: AxisName | None, what: str) -> AxisName:
    """Returns the mesh axis to sum over, or raises with the fix.

    Args:
        axis_name: The name or names that the caller gave; None for the only manual axis.
        what: The call as the user wrote it, for the message.
    """
    call = what.removeprefix("update of ").removeprefix("init of ")
    manual = manual_axes()
    if axis_name is None:
        if len(manual) == 1:
            return manual[0]
        if manual:
            raise AxisError(
                f"{what} found several mesh axes, {_list(manual)}, and was given none: "
                "name the one over which gradients are summed, such as "
                f"{call}(..., axis_name={manual[0]!r}), the same in all parts of a chain."
            )
        raise AxisError(
            f"{what} needs a mesh axis and found none. Call it inside jax.shard_map, where "
            "the mesh axes are manual, or let sparsejax.data_parallel(loss_fn, tx, mesh) "
            "make the whole step; under jax.vmap(..., axis_name=...) name the axis."
        )
    check_axis_name(axis_name, call)
    names = axis_names(axis_name)
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            raise AxisError(
                f"{what}: there is no manual axis {name!r} here; "
                + (
                    f"the manual axes are {_list(manual)}. Name one of these, or call it"
                    if manual
                    else "there is none. Call it"
                )
                + " inside jax.shard_map over that axis (and list the axis in"
                " axis_names=, where that is given). Under jit on a mesh of Auto axes, take"
                " gradients by sparsejax.per_replica."
            ) from None
    return axis_name


def resolve_for_state(axis_name: AxisName | None, what: str, keeps: str) -> AxisName:
    """Returns the axis as `resolve` does, for an `init` whose state depends on the ranks.

    Args:
        axis_name: The name or names that the caller gave.
        what: What is initialized, for the message.
        keeps: Why the state depends on the ranks, for the message.
    """
    try:
        return resolve(axis_name, f"init of {what}")
    except AxisError:
        if manual_axes():
            raise
        raise needs_ranks(keeps) from None


def mesh_of(x: Any) -> jax.sharding.AbstractMesh | None:
    """Returns the mesh of an array's type, or None if it has none."""
    mesh = jax.typeof(x).sharding.mesh if hasattr(x, "dtype") else None
    return None if mesh is None or mesh.empty else mesh


def outside_of(tree: Any, axis_name: AxisName | None) -> jax.sharding.AbstractMesh | None:
    """Returns the mesh with Explicit axes of a tree of arrays; None inside a manual axis.

    Args:
        tree: The arrays.
        axis_name: An axis that must not be bound yet, as `vmap(axis_name=...)` binds it:
            None is returned if it is.
    """
    if manual_axes():
        return None
    try:
        if axis_name is not None and lax.axis_size(axis_name):
            return None
    except NameError:
        pass
    meshes = filter(None, map(mesh_of, jax.tree.leaves(tree)))
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def require_local(
    name: str,
    leaf: Any,
    axis_name: AxisName,
    hint: str = "",
    local: str = "sparsejax.local(params)",
) -> None:
    """Raises if a gradient was already summed over the axis.

    Args:
        name: The path of the gradient.
        leaf: The gradient.
        axis_name: The mesh axis.
        hint: A sentence at the end of the message.
        local: What to differentiate with respect to, for the message.
    """
    if not is_checking(axis_name):
        return
    summed = set(axis_names(axis_name)) - varying_axes(leaf)
    if summed:
        other = sorted(varying_axes(leaf) - set(axis_names(axis_name)))
        instead = ""
        if other:
            instead = (
                f" It varies over {_list(other)}: if that is the axis of the ranks, name "
                f"it, axis_name={other[0]!r}, in all parts of the chain."
            )
        raise AlreadySummedError(
            f"the gradient of {name!r} was already summed over {_list(sorted(summed))}: it "
            "does not vary over it, so synchronizing it would send nothing less and count "
            "every rank twice. Either jax.grad did it, as for all parameters that are "
            f"replicated: differentiate with respect to {local} instead. Or "
            "you did, with jax.lax.pmean or psum, or with another synchronization in this "
            "chain: let one synchronization do it. (A constant does not vary either; nor "
            "does what optax.MultiSteps around a synchronization has added up: use "
            f"sparsejax.accumulate.){instead}{hint}"
        )


def _list(names) -> str:
    return ", ".join(repr(name) for name in names)
