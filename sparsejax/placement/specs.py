"""The PartitionSpecs of a state on a mesh.

State by rank is sharded over the axis of the ranks, and the rest is replicated over it. If
a further mesh axis shards the parameters, an array of the shape of a parameter is sharded
like it: in this library's states after the rank axis, in those of other optimizers as it
is. An array that is derived from a parameter and has none of its axes, such as a threshold,
has one piece for each rank and shard, concatenated.
"""

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from sparsejax import axes as mesh_axes
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError, AxisError, StateError
from sparsejax.placement.chains import check_not_inside
from sparsejax.state import sharded, tree
from sparsejax.state.parameters import (
    Parameter,
    ParameterSpecs,
    check_axes,
    of_per_rank,
    ranks_of as ranks_of,
)
from sparsejax.state.per_rank import PerRank, check_whole, find
from sparsejax.transforms.exchange import ExchangeState
from sparsejax.transforms.select import SelectState


def state_specs(state: Any, params: Any = None, param_specs: Any = None) -> Any:
    """Returns the PartitionSpecs of a state, for `shard_map` and for checkpoints.

    Args:
        state: An optimizer state or any tree, of arrays or abstract values.
        params: The parameters, or their abstract values, where a further mesh axis shards
            them.
        param_specs: The PartitionSpecs of the parameters: a tree like them, or a prefix of
            it, as `shard_map` takes.

    Returns:
        The same tree with a spec for every leaf. Without `param_specs` it is `P(axis)` for
        state by rank and `P()` for all others. With them the spec of an optimizer's array
        follows from its path and shape. If a framework has put arrays into its own
        containers, as `nnx.split` does, the spec is that of the array's sharding, which
        `sparsejax.bind` has set.

    Example:
        >>> opt_state = sparsejax.init(tx, params, mesh)
        >>> specs = sparsejax.state_specs(opt_state)
        >>> jax.tree.structure(specs) == jax.tree.structure(opt_state)
        True
    """
    if (params is None) != (param_specs is None):
        raise ArgumentError(
            "state_specs needs params and param_specs, or neither: the paths and shapes of "
            "the parameters tell it what is sharded like them."
        )
    if isinstance(state, optax.GradientTransformation):
        raise ArgumentError(
            "state_specs needs a state and was given a transformation: "
            "sparsejax.state_specs(sparsejax.init(tx, params, mesh)), or with "
            "jax.eval_shape around init where nothing is to be computed."
        )
    check_not_inside(state)
    check_whole(state)
    return _specs(state, None if params is None else ParameterSpecs.of(params, param_specs))


def _specs(state, known):
    """Returns the PartitionSpecs of a state; `known` are those of parameters, or None."""
    per_rank = lambda node: isinstance(node, PerRank)
    is_flat = not find(state, (PerRank, ExchangeState, SelectState))
    ours = lambda node: (
        isinstance(node, (PerRank, ExchangeState, SelectState)) or sharded.is_sharded(node)
    )

    def own(node):
        return of_per_rank(node, known) if per_rank(node) else PartitionSpec()

    def specs(path, node):
        if sharded.is_sharded(node):
            return node.specs(tree.named(path))
        if ours(node):
            return jax.tree.map(own, node, is_leaf=per_rank)
        if known is None:
            return _placed(node) if is_flat else PartitionSpec()
        return known.of_leaf(path, node)

    return jax.tree_util.tree_map_with_path(specs, state, is_leaf=ours)


def _placed(leaf):
    """Returns the spec of an array's sharding; `P()` if it is on no mesh."""
    return getattr(getattr(leaf, "sharding", None), "spec", PartitionSpec())


def places(state: Any, known: ParameterSpecs) -> Any:
    """Returns the specs of a state whose parameters are `ParameterSpecs.of_arrays`."""
    return _specs(state, known)


def data_axis(mesh: Mesh, axis_name: AxisName | None, what: str) -> AxisName:
    """Returns `axis_name` or, if None, the only axis of the mesh; raises if it has more."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ArgumentError(
            f"{what} needs a mesh, such as jax.make_mesh((8,), ('data',)), got a "
            f"{type(mesh).__name__}."
        )
    mesh_axes.check_axis_name(axis_name, what)
    if axis_name is None:
        if len(mesh.axis_names) != 1:
            raise AxisError(
                f"{what}: the mesh has the axes {mesh.axis_names}; name the one over which "
                f"gradients are synchronized, axis_name={mesh.axis_names[0]!r}, here and "
                f"in the chain: sparsejax.zen_sync({mesh.axis_names[0]!r})."
            )
        return mesh.axis_names[0]
    check_axes(mesh, mesh_axes.axis_names(axis_name), what)
    return axis_name


def check_shards(params: Any, mesh: Mesh | AbstractMesh) -> None:
    """Raises if a parameter cannot be sharded among the ranks of the mesh."""
    shards = sharded.apart(params)
    for path, node in zip(shards.paths, shards.nodes, strict=True):
        names = mesh_axes.axis_names(node.axis_name)
        check_axes(mesh, names, f"the table {path!r}")
        node.check_ranks(path, ranks_of(mesh, names))


def full_specs(params: Any, param_specs: Any) -> Any:
    """Returns a PartitionSpec for every parameter, from a tree of specs or a prefix."""
    return ParameterSpecs.of(params, param_specs).tree


def check_types(state: Any, specs: Any) -> None:
    """Raises if a state differs over an axis that its spec does not name."""
    is_spec = lambda node: isinstance(node, PartitionSpec)
    pairs = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), spec in zip(
        pairs, jax.tree.leaves(specs, is_leaf=is_spec), strict=True
    ):
        own = Parameter(tree.named(path), np.shape(leaf), spec)
        missing = sorted(mesh_axes.varying_axes(leaf) - own.axes)
        if missing:
            raise StateError(
                f"the state has at {own.path!r} an array of shape {list(own.shape)} that "
                f"differs over {missing[0]!r}, and no parameter has its path and shape: "
                "how it is sharded does not follow. Make the state in a shard_map of your "
                "own, or leave sharded parameters out of that transformation: "
                "optax.partition."
            )
