"""Where an update is entered: inside `shard_map`, or under `jit` on an explicit mesh.

Inside `shard_map` a gradient is this rank's own array. Under `jit` it is one global array,
and its type says what it stands for: the gradient with respect to parameters that
`sparsejax.local` has cast is *unreduced* over the mesh axes of the batch, so each device
holds a partial sum, and nothing was sent for it. Such an update enters a `shard_map` of its
own, over all axes of the mesh, with specs that are read from the types of the arrays. What
is inside is the same either way, and schemes never know.

On the wire, beside what the schemes send over the axis of the ranks: for each leaf that is
unreduced over further axes too, as over the fast one of a mesh (replica, fsdp), one
reduce-scatter over these to the sharding of its parameter (an all-reduce where that is
replicated). Then each device exchanges its shard.

Results have the shardings of the parameters, and the state keeps those that it has. There
is no checking inside: nothing casts an unreduced array to a varying one. What checking
would have found is read from the types here.

A sparsifier hands entries on, which differ by device. Outside they are global arrays, one
device's after another's along the leading axis, sharded over all axes of the mesh.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from sparsejax.axes import AxisName, axis_names, mesh_of
from sparsejax.errors import AlreadySummedError, ArgumentError, AxisError, missing_axis
from sparsejax.state import sharded, tree
from sparsejax.state.per_rank import OUTLINE, find
from sparsejax.units.row_grads import is_row_grads
from sparsejax.wire import Wire


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Reduction:
    """Whether ranks' gradients are averaged or added up: no array, and known when traced.

    Attributes:
        mean: Whether they are averaged.
    """

    mean: bool


@dataclasses.dataclass(frozen=True)
class Entry:
    """How an update is entered under `jit`.

    Attributes:
        name: The call as the user knows it.
        axis_name: The axis of the ranks; the only one of the mesh if None.
        sums: Whether it sums gradients; else it hands partial sums on.
        has_chain: Whether it runs a chain, which may have an optimizer in it.
        model_axis: The mesh axis over which it was told that parameters are sharded.
    """

    name: str
    axis_name: AxisName | None
    sums: bool = True
    has_chain: bool = False
    model_axis: AxisName | None = None

    def __call__(
        self,
        mesh: AbstractMesh,
        update: Callable[..., Any],
        updates: Any,
        state: Any,
        params: Any,
        **extra: Any,
    ) -> Any:
        """Enters an update from outside.

        Args:
            mesh: The mesh that `axes.outside_of` found.
            update: What runs inside `shard_map`.
            updates: Those of optax's `update`, as all that follow.
            state: The state.
            params: The parameters, or None.
            **extra: The extra arguments.
        """
        if any(reduction.mean for reduction in find(state, Reduction)):
            raise ArgumentError(
                f"update of {self.name} under jit: partial sums of a gradient add up to "
                "it, and reduce='mean' would divide it by the number of ranks once more. "
                "Write sparsejax.zen_sync(..., reduce='sum'), and in the same way of other "
                "synchronizations."
            )
        if self.model_axis is not None:
            raise ArgumentError(
                f"update of {self.name} under jit with model_axis={self.model_axis!r}: "
                "which leaves are copies over that axis is not known inside. Leave "
                "model_axis, and what needs it, out, or call update inside jax.shard_map."
            )
        if extra.get("ids"):
            raise ArgumentError(
                f"update of {self.name} under jit was given ids=, which are those of one "
                "device's batch, and a gradient there is summed over several devices "
                "before. Leave ids out: rows that are not zero are found without them."
            )
        entered = _Entered(self, mesh, frozenset(self._names(mesh)))
        return entered(update, updates, state, params, extra)

    def _names(self, mesh):
        """The axes of the ranks, or an error."""
        if self.axis_name is None and len(mesh.axis_names) > 1:
            raise AxisError(
                f"update of {self.name} under jit found a mesh of several axes, "
                f"{mesh.axis_names}, and was given none: name the one over which gradients "
                f"are summed, such as {mesh.axis_names[0]!r}."
            )
        names = axis_names(self.axis_name or mesh.axis_names[0])
        for name in names:
            if name not in mesh.axis_names:
                raise missing_axis(f"update of {self.name}", name, mesh.axis_names)
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
            if kind != AxisType.Explicit:
                raise AxisError(
                    f"update of {self.name} under jit: the mesh axis {name!r} is "
                    f"{kind.name}, where types do not tell what is still to be summed. "
                    "Make the mesh with axis_types=(jax.sharding.AxisType.Explicit,) * "
                    f"{len(mesh.axis_names)}, as jax.make_mesh does by default, or call "
                    "update inside jax.shard_map."
                )
        return names


@dataclasses.dataclass(frozen=True)
class _Entered:
    """An update that was entered under `jit`."""

    entry: Entry
    mesh: AbstractMesh
    names: frozenset[str]

    def __call__(self, update, updates, state, params, extra):
        is_leaf = lambda x: tree.is_sparse(x) or is_row_grads(x) or sharded.is_sharded(x)
        pairs, structure = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_leaf)
        of_params = [None] * len(pairs)
        if params is not None:
            of_params = structure.flatten_up_to(params)
        paths = [tree.named(keys) for keys, _ in pairs]
        for path, param in zip(paths, of_params, strict=True):
            self._check_parameter(path, param)
        leaves = [leaf for _, leaf in pairs]
        own = zip(paths, leaves, of_params, strict=True)
        specs = [self._spec_of(*each) for each in own]
        scatters = [
            None
            if spec is None or tree.is_sparse(leaf)
            else self._scatter(path, leaf, spec)
            for path, leaf, spec in zip(paths, leaves, specs, strict=True)
        ]
        given = [
            leaf
            if scatter is None
            else jax.reshard(leaf, NamedSharding(self.mesh, scatter.spec))
            for leaf, scatter in zip(leaves, scatters, strict=True)
        ]
        # What is no array, as a function or a flag, is known when traced.
        arrays = {key: value for key, value in extra.items() if _is_arrays(value)}
        rest = {key: value for key, value in extra.items() if key not in arrays}
        operands = structure.unflatten(given), state, params, arrays
        in_specs = (
            structure.unflatten(list(map(self._given_spec, given, scatters))),
            *jax.tree.map(_spec, operands[1:]),
        )

        def inside(updates, state, params, arrays):
            own = zip(structure.flatten_up_to(updates), scatters, strict=True)
            own = [leaf if scatter is None else scatter(leaf) for leaf, scatter in own]
            updates = structure.unflatten(own)
            return update(updates, state, params, **arrays, **rest)

        out_specs = self._out_specs(inside, operands, in_specs, structure, specs)
        return self._mapped(inside, in_specs, out_specs)(*operands)

    def _mapped(self, function, in_specs, out_specs):
        options = {"mesh": self.mesh, "in_specs": in_specs, "check_vma": False}
        return jax.shard_map(function, **options, out_specs=out_specs)

    def _out_specs(self, inside, operands, in_specs, structure, specs):
        """The specs of what comes out: its structure is known when it was traced."""
        found = []

        def outlined(*operands):
            updates, _ = inside(*operands)
            found.extend(structure.flatten_up_to(updates))

        token = OUTLINE.set(True)
        try:
            jax.eval_shape(self._mapped(outlined, in_specs, None), *operands)
        finally:
            OUTLINE.reset(token)
        return structure.unflatten(list(map(self._made_spec, found, specs))), in_specs[1]

    def _spec_of(self, path, leaf, param):
        """How a leaf is sharded once it was reduced over all axes but the ranks'."""
        name = self.entry.name
        if is_row_grads(leaf) or sharded.is_sharded(leaf):
            raise ArgumentError(
                f"update of {name} under jit: the gradient of {path!r} is a "
                f"{type(leaf).__name__}, and only arrays are taken there. Make it an array "
                "by its method to_dense(), or call update inside jax.shard_map."
            )
        if tree.is_masked(leaf):
            return None
        of_param = None if param is None else _spec(param)
        if tree.is_sparse(leaf):
            if self.entry.sums and of_param is None:
                raise ArgumentError(self._needs_params(path))
            self._check_whole(path, of_param)
            return of_param
        spec = jax.typeof(leaf).sharding.spec
        unreduced = frozenset(spec.unreduced)
        if missing := sorted(self.names - unreduced):
            raise AlreadySummedError(
                f"update of {name} under jit: the gradient of {path!r} is not unreduced "
                f"over {missing[0]!r}, so it is summed already, and nothing would be "
                "saved. Differentiate with respect to sparsejax.local(params, axes), with "
                "all mesh axes over which the batch is sharded."
            )
        if unreduced - self.names and of_param is None:
            raise ArgumentError(self._needs_params(path))
        of_param = PartitionSpec(*spec.partitions) if of_param is None else of_param
        self._check_whole(path, of_param)
        return of_param

    def _check_parameter(self, path, param):
        """Raises where a parameter is not one that an update is given under `jit`."""
        if mesh_of(param) is None:
            return
        spec = jax.typeof(param).sharding.spec
        if spec.reduced:
            raise ArgumentError(
                f"update of {self.entry.name} under jit was given what sparsejax.local "
                f"returned for {path!r}: give it the parameters themselves, "
                "tx.update(grads, opt_state, params)."
            )
        if self.entry.has_chain and any(spec.partitions):
            raise ArgumentError(
                f"update of {self.entry.name} under jit: {path!r} is sharded "
                f"{spec}, and the chain inside would run on shards, where a norm over all "
                "leaves is that of a shard. Replicate the parameters over all axes, or "
                "call update inside jax.shard_map."
            )

    def _needs_params(self, path):
        return (
            f"update of {self.entry.name} under jit: how the gradient of {path!r} is to be "
            "sharded is known from its parameter. Give update the parameters: "
            "tx.update(grads, opt_state, params)."
        )

    def _check_whole(self, path, spec):
        """Raises where a parameter is sharded over the axis of the sum."""
        parts = () if spec is None else spec.partitions
        over = {name for part in parts for name in axis_names(part or ())}
        if found := sorted(over & self.names):
            raise ArgumentError(
                f"update of {self.entry.name} under jit: {path!r} is sharded over "
                f"{found[0]!r}, over which its gradient is summed, and each rank needs "
                "only its shard of the sum. That is not done yet: shard it over another "
                "axis of the mesh, or sum its gradient densely by jax.reshard."
            )

    def _scatter(self, path, leaf, spec):
        """How a leaf is reduced over the axes that are not those of the ranks."""
        unreduced = frozenset(jax.typeof(leaf).sharding.spec.unreduced)
        found = _ShardSum(spec.partitions, unreduced, unreduced - self.names)
        for part in found.parts:
            names, own = found.names(part)
            if names[len(names) - len(own) :] != own:
                order = tuple(name for name in names if name not in own) + own
                raise ArgumentError(
                    f"update of {self.entry.name} under jit: {path!r} is sharded over "
                    f"{names}, of which its gradient is summed over {own}, and that is "
                    f"scattered to pieces of pieces alone. Shard it over {order}."
                )
        return found

    def _by_device(self, leaf):
        """The specs of entries, one device's after another's."""
        return jax.tree.map(lambda x: PartitionSpec(self.mesh.axis_names), leaf)

    def _given_spec(self, leaf, scatter):
        if tree.is_sparse(leaf):
            return self._by_device(leaf)
        return leaf if scatter is None else scatter.spec

    def _made_spec(self, leaf, spec):
        if tree.is_sparse(leaf):
            return self._by_device(leaf)
        if spec is None:
            return leaf
        if self.entry.sums:
            return spec
        return PartitionSpec(*spec.partitions, unreduced=self.names)


@dataclasses.dataclass(frozen=True)
class _ShardSum:
    """The sum of an array over mesh axes that are not those of the ranks.

    Attributes:
        parts: How the sum is sharded, dimension by dimension.
        unreduced: The axes over which the array is unreduced.
        over: Those over which it is summed here.
    """

    parts: tuple[Any, ...]
    unreduced: frozenset[str]
    over: frozenset[str]

    def names(self, part: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes that shard a dimension, and the last of them, which are summed over."""
        names = axis_names(part or ())
        return names, tuple(name for name in names if name in self.over)

    @property
    def spec(self) -> PartitionSpec:
        """How the array is sharded before."""
        left = []
        for names, own in map(self.names, self.parts):
            left.append(names[: len(names) - len(own)] or None)
        return PartitionSpec(*left, unreduced=self.unreduced)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The sum, inside `shard_map`."""
        left = set(self.over)
        for at, (_, own) in enumerate(map(self.names, self.parts)):
            if not own:
                continue
            left -= {*own}
            wire = Wire(own)
            shape = *x.shape[:at], wire.ranks, -1, *x.shape[at + 1 :]
            pieces = jnp.moveaxis(x.reshape(shape), at, 0)
            x = wire.reduce_scatter(pieces)[0].astype(x.dtype)
        return Wire(tuple(sorted(left))).psum(x)[0] if left else x


def _spec(x):
    """How an array is sharded, by its type; what is on no mesh is replicated."""
    if mesh_of(x) is None:
        return PartitionSpec()
    return PartitionSpec(*jax.typeof(x).sharding.spec.partitions)


def _is_arrays(value):
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(hasattr(x, "dtype") for x in leaves)
