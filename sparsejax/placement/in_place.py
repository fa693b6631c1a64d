"""Makes states for updates under `jit`, from parameters that remain where they are.

The state of an optimizer is sharded as the parameters are, also over the axis of the ranks.
State by rank has a leading axis that is sharded over the axis of the ranks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError, AxisError
from sparsejax.state import observing, sharded, tree


def made(tx: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """Makes a state whose arrays are sharded as the parameters are.

    Each part of a chain reads the sharding from types, which have it on Explicit axes
    alone. So a mesh with Auto axes is replaced by one with Explicit axes for the call.
    """
    kinds = (AxisType.Explicit,) * len(mesh.axis_names)
    is_typed = {*mesh.axis_types} == {AxisType.Explicit}
    typed = mesh if is_typed else Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)

    def on(mesh, x):
        found = x.sharding if isinstance(x, jax.Array) else None
        parts = [*found.spec] if isinstance(found, NamedSharding) else []
        # In the form in which a step returns the spec, so that the step compiles once.
        while parts and parts[-1] is None:
            parts.pop()
        if mesh is typed:
            parts += [None] * (jnp.ndim(x) - len(parts))
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*parts)))

    with jax.set_mesh(typed):
        state = jax.jit(tx.init)(jax.tree.map(functools.partial(on, typed), params))
    return jax.tree.map(functools.partial(on, mesh), state)


def whole(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a parameter, without its sharding."""
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def of_arrays(
    tx: optax.GradientTransformation, params: Any, axis_name: AxisName | None
) -> tuple[Mesh, AxisName | None, Any]:
    """Returns the mesh of parameters, the axis of the ranks, and the parameters' specs.

    The axis is that given, or that of the transformation, or the only one of the mesh; None
    if these leave several.
    """
    tree.check_transformation(tx, ())
    sharded.refuse(
        params,
        "sparsejax.init without a mesh",
        "and update under jit takes none: name the mesh, sparsejax.init(tx, params, mesh), "
        "and call update inside jax.shard_map.",
    )
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(params)]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    meshes = [mesh for mesh in meshes if isinstance(mesh, Mesh)]
    if not meshes and any(isinstance(x, Tracer) for x in jax.tree.leaves(params)):
        raise ArgumentError(
            "sparsejax.init was given no mesh, and parameters that are traced, as inside "
            "jax.jit and jax.eval_shape: only arrays say where they are. Call it outside, "
            "on the arrays; or inside call tx.init(params), which reads the types of an "
            "explicit mesh, or name the mesh: sparsejax.init(tx, params, mesh)."
        )
    if not meshes or len({*meshes[0].axis_types}) != 1:
        raise ArgumentError(
            "sparsejax.init was given no mesh, and no parameter is on one whose axes are "
            "all Explicit, as jax.make_mesh makes it, or all Auto. Where update is called "
            "under jit, put the parameters on such a mesh: jax.device_put(params, "
            "jax.sharding.NamedSharding(mesh, P())); where it is called inside shard_map, "
            "name the mesh: sparsejax.init(tx, params, mesh)."
        )
    if axis_name is None:
        seen = observing.observed(tx, params)
        found = {part.part.axis_name for part in (*seen.exchanges, *seen.sparsifiers)}
        found = {name for name in found if name is not None}
        if len(found) > 1 and len(meshes[0].axis_names) > 1:
            raise AxisError(
                "sparsejax.init: parts of the chain name different axes, "
                f"{' and '.join(sorted(map(repr, found)))}: give the synchronization and "
                "all before it the axis over which gradients are summed."
            )
        # A transformation without an axis name means the only axis of the mesh.
        found = found or {*meshes[0].axis_names}
        axis_name = found.pop() if len(found) == 1 else None
    lies = lambda s: s.spec if isinstance(s, NamedSharding) else PartitionSpec()
    specs = jax.tree.unflatten(jax.tree.structure(params), list(map(lies, shardings)))
    return meshes[0], axis_name, specs
