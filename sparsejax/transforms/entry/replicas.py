"""Gradients by replica on any mesh: the loss runs in a `shard_map` over the ranks' axis.

Nothing is sent over that axis. All other axes are left to XLA, which shards the loss and
sums gradients over them as usual.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from sparsejax import axes
from sparsejax.axes import AxisName, axis_names
from sparsejax.errors import ArgumentError, AxisError
from sparsejax.state.parameters import ParameterSpecs
from sparsejax.state.per_replica import PerReplica, is_per_replica, mesh_here
from sparsejax.transforms.entry.shards import ShardSum
from sparsejax.units.row_grads import is_row_grads


_CALL = "sparsejax.per_replica"


def per_replica(
    value_and_grad: Callable[..., Any],
    axis_name: AxisName,
    param_specs: Any = None,
    *,
    mesh: Mesh | AbstractMesh | None = None,
) -> Callable[..., Any]:
    """Makes a `jax.value_and_grad` whose gradients stay on their replica, under `jit`.

    It is for meshes with Auto axes, where types do not say what is still to be summed, and
    for `sparsejax.local_steps` on any mesh, where each replica has its own parameters. The
    loss of a replica is that of its part of the batch. XLA shards it over all other Auto
    axes of the mesh, by its own rules and by `jax.lax.with_sharding_constraint`. Over
    Explicit axes it is sharded as the loss says, for example by `jax.reshard(w, P())`.

    Args:
        value_and_grad: `jax.value_and_grad(loss_fn)`, with or without `has_aux`, or
            `sparsejax.value_and_grad(loss_fn)`. Its first argument is the parameters, equal
            on all replicas; or with local steps the result of `sparsejax.local`. All others
            are arrays whose leading axis is that of the batch.
        axis_name: The mesh axis over which gradients are to stay local.
        param_specs: The parameters' PartitionSpecs: a tree like them, or a prefix of it;
            replicated if None.
        mesh: The mesh; that of `jax.set_mesh` if None.

    Returns:
        A function that returns the losses of all replicas, [replicas], with auxiliary
        outputs stacked in the same way, and gradients for `update`: `PerReplica`.

    Example:
        >>> def step(params, opt_state, batch):
        ...     value_and_grad = jax.value_and_grad(loss_fn)
        ...     losses, grads = sparsejax.per_replica(value_and_grad, "replica")(
        ...         params, batch)
        ...     updates, opt_state = tx.update(grads, opt_state, params)
        ...     return optax.apply_updates(params, updates), opt_state, losses.mean()

    See Also:
        `sparsejax.local`: local gradients inside `shard_map`, or on an explicit mesh.
        `sparsejax.value_and_grad`: gradients of tables by rows.
        `sparsejax.embrace.value_and_grad`: gradients of tables by columns, not yet sent.
    """
    axes.check_axis_name(axis_name, _CALL)
    names = axis_names(axis_name)

    @functools.wraps(value_and_grad)
    def call(params, *batch):
        if axes.manual_axes():
            raise AxisError(
                f"{_CALL} makes a shard_map of its own, and was called inside one: call it "
                "under jit, or differentiate with respect to sparsejax.local(params) here."
            )
        own = mesh_here(mesh, names, _CALL)
        given, of_params = jax.tree.flatten(params, is_leaf=is_per_replica)
        shapes = of_params.unflatten([_whole(names, x) for x in given])
        known = ParameterSpecs.of(
            shapes, PartitionSpec() if param_specs is None else param_specs
        )
        is_spec = lambda node: isinstance(node, PartitionSpec)
        specs = jax.tree.leaves(known.tree, is_leaf=is_spec)
        over = PartitionSpec(axis_name)

        def replica(given, *batch):
            made = value_and_grad(of_params.unflatten(map(_own, given)), *batch)
            if not (isinstance(made, tuple) and len(made) == 2):
                raise ArgumentError(
                    f"{_CALL} takes a function that returns (value, gradients), as "
                    "jax.value_and_grad(loss_fn) does."
                )
            value, grads = made
            leaves, structure = jax.tree.flatten(grads, is_leaf=is_row_grads)
            if len(leaves) != len(specs):
                raise ArgumentError(
                    f"{_CALL}: there are {len(specs)} parameters, and {len(leaves)} "
                    "gradients: differentiate with respect to the first argument."
                )
            placed = map(functools.partial(_placed, names), leaves, specs)
            stacked = lambda x: jax.tree.map(lambda y: y[None], x)
            return stacked(value), structure.unflatten(map(stacked, placed))

        by_leaf = [over if is_per_replica(x) else PartitionSpec() for x in given]
        mapped = jax.shard_map(
            replica,
            mesh=own,
            in_specs=(by_leaf, *[over] * len(batch)),
            out_specs=over,
            axis_names={*names},
            check_vma=False,
        )
        value, grads = mapped(given, *batch)
        leaves, structure = jax.tree.flatten(grads, is_leaf=is_row_grads)
        nodes = [
            PerReplica(leaf, axis_name, spec, own)
            for leaf, spec in zip(leaves, specs, strict=True)
        ]
        return value, structure.unflatten(nodes)

    return call


def _whole(names, x):
    """Returns a parameter, or the shape of one if it is stacked by replica."""
    if not is_per_replica(x):
        return x
    if axis_names(x.axis_name) != names:
        raise AxisError(
            f"{_CALL} over {names} was given parameters that are stacked over "
            f"{x.axis_name!r}: give it and sparsejax.local the same axis."
        )
    return jax.ShapeDtypeStruct(x.value.shape[1:], x.value.dtype)


def _own(x):
    """Returns this replica's parameter, inside `shard_map`."""
    return x.value[0] if is_per_replica(x) else x


def _placed(names, leaf, spec):
    """Constrains a gradient to the spec of its parameter, without the axes `names`."""
    if is_row_grads(leaf):
        return leaf
    left = ShardSum(spec, names).own
    if not any(left):
        return leaf
    mesh = axes.mesh_of(leaf)
    if mesh is not None and AxisType.Explicit in mesh.axis_types:
        return jax.reshard(leaf, PartitionSpec(*left))
    return jax.lax.with_sharding_constraint(leaf, PartitionSpec(*left))
