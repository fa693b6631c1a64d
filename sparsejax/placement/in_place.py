"""States for updates under `jit`: each part of a chain makes its own, where parameters are.

Nothing of a parameter is moved. What an optimizer keeps is sharded as the parameters are,
over the axis of the ranks too. What differs by rank is sharded over that axis first.
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
    """A state that each part of a chain makes where its parameters are.

    Types say where that is, on explicit axes alone; so they are made such for a while.
    """
    kinds = (AxisType.Explicit,) * len(mesh.axis_names)
    is_typed = {*mesh.axis_types} == {AxisType.Explicit}
    typed = mesh if is_typed else Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)

    def on(mesh, x):
        found = x.sharding if isinstance(x, jax.Array) else None
        parts = [*found.spec] if isinstance(found, NamedSharding) else []
        # As a step returns it, so that the first one is compiled for all.
        while parts and parts[-1] is None:
            parts.pop()
        if mesh is typed:
            parts += [None] * (jnp.ndim(x) - len(parts))
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*parts)))

    with jax.set_mesh(typed):
        state = jax.jit(tx.init)(jax.tree.map(functools.partial(on, typed), params))
    return jax.tree.map(functools.partial(on, mesh), state)


def whole(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a parameter, wherever it is."""
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def of_arrays(
    tx: optax.GradientTransformation, params: Any, axis_name: AxisName | None
) -> tuple[Mesh, AxisName | None, Any]:
    """The mesh of parameters, the axis of the ranks, and how parameters are sharded."""
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
        # Where none is named the only axis of the mesh is meant.
        found = found or {*meshes[0].axis_names}
        axis_name = found.pop() if len(found) == 1 else None
    lies = lambda s: s.spec if isinstance(s, NamedSharding) else PartitionSpec()
    specs = jax.tree.unflatten(jax.tree.structure(params), list(map(lies, shardings)))
    return meshes[0], axis_name, specs
