"""Gradients stacked by replica over a mesh axis, where types cannot show partial sums."""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from sparsejax.axes import AxisName, axis_names
from sparsejax.errors import ArgumentError, AxisError, missing_axis


_REPLICATED = PartitionSpec()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("value",),
    meta_fields=("axis_name", "spec", "mesh"),
)
@dataclasses.dataclass(frozen=True)
class PerReplica:
    """The gradient of one parameter on each replica, stacked along a mesh axis.

    `sparsejax.per_replica` returns them. Gradients that are stacked already, as by
    `jax.vmap` with `spmd_axis_name`, are wrapped by hand. Under `jit` the `update` of a
    synchronization takes them, and returns arrays that are sharded as the parameters.

    Attributes:
        value: [replicas, ...], sharded `P(axis_name, *spec)`.
        axis_name: The mesh axis of the replicas.
        spec: The parameter's PartitionSpec.
        mesh: The mesh; that of `jax.set_mesh` if None.

    Example:
        >>> mesh = jax.make_mesh((1,), ("replica",))
        >>> node = sparsejax.transforms.PerReplica
        >>> grads = node(jnp.ones((1, 8, 4)), "replica", P(), mesh)
        >>> grads.value.shape
        (1, 8, 4)
    """

    value: Any
    axis_name: AxisName
    spec: PartitionSpec = _REPLICATED
    mesh: Mesh | AbstractMesh | None = None

    def __post_init__(self):
        if not isinstance(self.spec, PartitionSpec):
            raise ArgumentError(
                "sparsejax.transforms.PerReplica: spec must be the PartitionSpec of the "
                f"parameter, P() for one that is replicated, got {self.spec!r}."
            )

    def mesh_here(self, call: str) -> Mesh | AbstractMesh:
        """Returns the mesh of the node, or of the context; raises if there is none."""
        return mesh_here(self.mesh, axis_names(self.axis_name), call)


def is_per_replica(leaf: Any) -> bool:
    """Returns whether a leaf of a tree of gradients is stacked by replica."""
    return isinstance(leaf, PerReplica)


def per_replica_nodes(tree: Any) -> list[PerReplica]:
    """Returns the gradients of a tree that are stacked by replica."""
    return list(filter(is_per_replica, jax.tree.leaves(tree, is_leaf=is_per_replica)))


def mesh_here(
    mesh: Mesh | AbstractMesh | None, names: tuple[str, ...], call: str
) -> Mesh | AbstractMesh:
    """Returns the mesh given, or that of `jax.set_mesh`; raises unless it has the axes.

    Args:
        mesh: The mesh, or None.
        names: The axes that it must have.
        call: The call as the user wrote it, for the message.
    """
    found = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if found.empty:
        raise AxisError(
            f"{call} found no mesh: call jax.set_mesh(mesh) before, or use it as a context "
            "around the step, with jax.set_mesh(mesh): ...; or pass mesh=mesh."
        )
    for name in names:
        if name not in found.axis_names:
            raise missing_axis(call, name, found.axis_names)
    return found
