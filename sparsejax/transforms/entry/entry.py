"""Entering: the `shard_map` that is made around an `update` that is called under `jit`.

Inside `shard_map` a gradient is this rank's own array. Under `jit` it is one global array,
and one of two things determines what it stands for:

* On an explicit mesh, its type. The gradient with respect to parameters that
  `sparsejax.local` has cast is *unreduced* over the mesh axes of the batch: each device
  holds a partial sum, and nothing was sent for it.
* On any mesh, its node, a `PerReplica`: the gradients of all replicas, stacked over the
  axis of the ranks; each device has that of its own replica.

Such an update enters a `shard_map` over all axes of the mesh. Inside, both cases are the
same, and schemes do not depend on them.

On the wire, in addition to what the schemes send over the axis of the ranks: for each leaf
that is unreduced over further axes, such as the fast one of a mesh (replica, fsdp), one
reduce-scatter over these to the sharding of its parameter (an all-reduce if that is
replicated). Then each device exchanges its shard. If a parameter is sharded over the axis
of the ranks itself, each rank receives only its piece of the sum.

Results have the shardings of the parameters. What a state keeps for a parameter has a
leading axis of the ranks, and is sharded after it like the parameter. The `shard_map` has
`check_vma=False`, because no cast makes an unreduced array varying; what checking would
have found is read from types here.

A sparsifier returns entries, which differ by device. Outside they are global arrays: those
of all devices concatenated along the leading axis, sharded over all axes of the mesh.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sparsejax import axes
from sparsejax.axes import AxisName, axis_names
from sparsejax.errors import ArgumentError, AxisError, StateError, missing_axis
from sparsejax.state import observing, sharded, tree, weights
from sparsejax.state.parameters import ParameterSpecs, ranks_of
from sparsejax.state.per_rank import OUTLINE, check_ranks, find
from sparsejax.state.per_replica import is_per_replica, per_replica_nodes
from sparsejax.transforms.buckets.leaf_places import LeafPlaces
from sparsejax.transforms.entry.incoming import Incoming, check_sum, spec_of
from sparsejax.transforms.entry.leaves import shard_shape, whole_shape
from sparsejax.transforms.entry.shards import ShardSum
from sparsejax.transforms.entry.states import check_state, shards_of, state_specs
from sparsejax.units.indices import Origin
from sparsejax.units.row_grads import is_row_grads


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Reduction:
    """Whether the gradients of the ranks are averaged or summed; static under `jit`.

    Attributes:
        mean: Whether they are averaged.
    """

    mean: bool


@dataclasses.dataclass(frozen=True)
class Entry:
    """How the update of a transformation is entered under `jit`.

    Attributes:
        name: The name of the public function.
        axis_name: The axis of the ranks; the only one of the mesh if None.
        sums: Whether the update sums gradients; if not, it returns partial sums.
        model_axis: The argument `model_axis`: the mesh axis over which parameters are
            sharded. It is refused under `jit`.
        reads_params: Whether the update is given the parameters, sharded like gradients.
    """

    name: str
    axis_name: AxisName | None
    sums: bool = True
    model_axis: AxisName | None = None
    reads_params: bool = False

    def outside(self, updates: Any, state: Any, params: Any) -> Any:
        """Returns the mesh if an update is called outside of `shard_map`, else None."""
        if axes.manual_axes():
            return None
        for node in per_replica_nodes(updates):
            return node.mesh_here(f"update of {self.name}")
        return axes.outside_of((updates, params, state), self.axis_name)

    def run(
        self,
        update: Callable[..., Any],
        updates: Any,
        state: Any,
        params: Any,
        **extra: Any,
    ) -> Any:
        """Calls `update(updates, state, **extra)`, in a new `shard_map` if outside of one.

        Args:
            update: The function that runs inside. If a `shard_map` was entered, it is also
                given `entered`, a `LeafPlaces`.
            updates: The gradients.
            state: A pytree of arrays; those that differ by rank are `PerRank`.
            params: The parameters, or None.
            **extra: Further arguments of `update`.

        Returns:
            What `update` returns: the updates, and a second pytree, such as the state.
        """
        mesh = self.outside(updates, state, params)
        if mesh is None:
            return update(updates, state, **extra)
        names = self._names(mesh, updates)
        if any(reduction.mean for reduction in find(state, Reduction)):
            _check_mean(self.name, updates)
        if self.model_axis is not None:
            raise ArgumentError(
                f"update of {self.name} under jit with model_axis={self.model_axis!r}: "
                "how leaves are sharded is read from the parameters there. Leave "
                "model_axis out, or call update inside jax.shard_map."
            )
        if extra.get("ids"):
            raise ArgumentError(
                f"update of {self.name} under jit was given ids=, which are those of one "
                "device's batch, and a gradient there is summed over several devices "
                "before. Leave ids out: rows that are not zero are found without them."
            )
        if extra.get("weight") is not None:
            ranks = ranks_of(mesh, names)
            extra["weight"] = weights.replicated(extra["weight"], ranks, mesh)
        entered = _EnteredUpdate(self, mesh, names)
        try:
            return entered(update, updates, state, params, extra)
        except StateError as error:
            raise StateError(
                f"{error} Under jit, sparsejax.init(tx, params) makes the state: it reads "
                "the mesh, and how parameters are sharded, from their arrays."
            ) from None

    def of_parameters(self, params: Any) -> Any:
        """Returns the explicit mesh of parameters, for an init outside of `shard_map`.

        It is None inside of one, without such a mesh, or if the mesh does not determine the
        axis of the ranks.
        """
        if observing.is_observing() or sharded.apart(params).nodes:
            return None
        mesh = axes.outside_of(params, self.axis_name)
        if mesh is None or {*mesh.axis_types} != {AxisType.Explicit}:
            return None
        if self.axis_name is None:
            return mesh if len(mesh.axis_names) == 1 else None
        return mesh if {*axis_names(self.axis_name)} <= {*mesh.axis_names} else None

    def init(self, mesh: Any, init: Callable[[Any], Any], params: Any) -> Any:
        """Makes a state inside `shard_map`, so that its arrays have their shardings.

        Args:
            mesh: The mesh that `of_parameters` returned.
            init: A function from parameters to a state. It is given zeros of the shapes of
                shards.
            params: The parameters; no array of them is read.
        """
        names = axis_names(self.axis_name or mesh.axis_names[0])
        pairs, structure = jax.tree_util.tree_flatten_with_path(params)
        # It is not known yet which further axes gradients will be unreduced over.
        others = frozenset(mesh.axis_names) - {*names}
        shapes, specs, sums = [], [], []
        for keys, leaf in pairs:
            of = ShardSum(spec_of(leaf), names, others)
            check_sum(of, f"init of {self.name}", tree.named(keys))
            shape = shard_shape(jnp.shape(leaf), of, mesh)
            shapes.append(jax.ShapeDtypeStruct(shape, jnp.result_type(leaf)))
            specs.append(PartitionSpec(*of.own))
            sums.append(of)
        of_shards = structure.unflatten(shapes)
        known = ParameterSpecs.of(of_shards, structure.unflatten(specs))
        concrete = [x.sharding.mesh for _, x in pairs if _is_on_mesh(x)]
        mesh = concrete[0] if concrete else mesh

        def made():
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), of_shards)
            with tree.of_shards(shards_of(pairs, sums)):
                return init(zeros)

        mapped = lambda specs: jax.shard_map(
            made, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False
        )
        state = jax.eval_shape(mapped(PartitionSpec()))
        return jax.jit(mapped(state_specs(state, known)))()

    def _names(self, mesh, updates):
        """Returns the axes of the ranks; raises if they are not determined, or differ."""
        stacked = [node.axis_name for node in per_replica_nodes(updates)]
        known = self.axis_name or next(iter(stacked), None)
        if known is None and len(mesh.axis_names) > 1:
            raise AxisError(
                f"update of {self.name} under jit found a mesh of several axes, "
                f"{mesh.axis_names}, and was given none: name the one over which gradients "
                f"are summed, such as {mesh.axis_names[0]!r}."
            )
        names = axis_names(known or mesh.axis_names[0])
        for name in names:
            if name not in mesh.axis_names:
                raise missing_axis(f"update of {self.name}", name, mesh.axis_names)
        for axis_name in stacked:
            if axis_names(axis_name) != names:
                raise AxisError(
                    f"update of {self.name} under jit sums over {names}, and was given "
                    f"gradients that are stacked over {axis_name!r}: give both the same "
                    "axis."
                )
        if not stacked:
            self._check_explicit(mesh)
        return names

    def _check_explicit(self, mesh):
        """Raises unless all mesh axes are Explicit: other types are not unreduced."""
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
            if kind != AxisType.Explicit:
                raise AxisError(
                    f"update of {self.name} under jit: the mesh axis {name!r} is "
                    f"{kind.name}, where types do not tell what is still to be summed. "
                    "Differentiate by sparsejax.per_replica(jax.value_and_grad(loss_fn), "
                    "axis_name), make the mesh with axis_types=(jax.sharding.AxisType."
                    f"Explicit,) * {len(mesh.axis_names)}, as jax.make_mesh does by "
                    "default, or call update inside jax.shard_map."
                )


@dataclasses.dataclass(frozen=True)
class _EnteredUpdate:
    """An update that was entered under `jit`."""

    entry: Entry
    mesh: Mesh | AbstractMesh
    names: tuple[str, ...]

    def __call__(self, update, updates, state, params, extra):
        is_leaf = lambda x: (
            tree.is_sparse(x)
            or is_row_grads(x)
            or sharded.is_sharded(x)
            or is_per_replica(x)
        )
        pairs, structure = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_leaf)
        of_params = self._params(structure, params)
        come = Incoming(self.entry.name, self.names, self.mesh, self.entry.sums)
        leaves = [
            come.leaf(tree.named(keys), leaf, param)
            for (keys, leaf), param in zip(pairs, of_params, strict=True)
        ]
        check_ranks(state, ranks_of(self.mesh, self.names), inside=False)
        shards = shards_of(pairs, [leaf.sum for leaf in leaves])
        arrays, rest = tree.arrays_and_others(extra)
        read = self._read(pairs, leaves, of_params)
        operands = [leaf.given for leaf in leaves], state, arrays, read
        in_specs = (
            [leaf.in_spec for leaf in leaves],
            state_specs(state, self._known(structure, leaves)),
            jax.tree.map(spec_of, arrays),
            [PartitionSpec(*leaf.sum.own) for leaf in leaves[: len(read)]],
        )
        check_state(state, in_specs[1])

        def inside(given, state, arrays, read):
            found = [leaf.enter(x) for leaf, x in zip(leaves, given, strict=True)]
            entered = LeafPlaces(
                tuple(leaf.sum.scatter if self.entry.sums else None for leaf in leaves),
                tuple(leaf.axes for leaf in leaves),
                tuple(sent for _, sent in found),
            )
            updates = structure.unflatten([x for x, _ in found])
            own = {"params": structure.unflatten(read)} if read else {}
            extra = {"entered": entered, **arrays, **rest, **own}
            with tree.of_shards(shards):
                out, after = update(updates, state, **extra)
            own = structure.flatten_up_to(out)
            leave = lambda leaf, x: leaf.summed(x) if self.entry.sums else leaf.leave(x)
            return list(map(leave, leaves, own)), after

        of_shards = self._known(structure, leaves, of_shards=True)
        out_specs = self._out_specs(inside, operands, in_specs, leaves, of_shards)
        out, after = self._mapped(inside, in_specs, out_specs)(*operands)
        if not self.entry.sums:
            out = [leaf.handed_on(x) for leaf, x in zip(leaves, out, strict=True)]
        return structure.unflatten(list(map(_marked, out))), after

    def _params(self, structure, params):
        """Returns the parameter of each gradient; None for each if none were given."""
        if params is None:
            return [None] * structure.num_leaves
        try:
            return structure.flatten_up_to(params)
        except ValueError as error:
            raise ArgumentError(
                f"update of {self.entry.name} under jit: the parameters are not a tree "
                f"like the gradients: {str(error).splitlines()[0]} Where a gradient is "
                "None, its parameter must be None, too."
            ) from None

    def _read(self, pairs, leaves, params):
        """Returns the parameters of all gradients if the update reads them, else []."""
        if not self.entry.reads_params:
            return []
        for (keys, _), leaf in zip(pairs, leaves, strict=True):
            if leaf.sum.scatter is not None:
                raise ArgumentError(
                    f"update of {self.entry.name} under jit: the parameter "
                    f"{tree.named(keys)!r} is sharded {leaf.sum.spec}, over the axis of "
                    "the ranks, and what each rank sends depends on the whole of it: "
                    "shard it over another axis, or replicate it."
                )
        return params

    def _mapped(self, function, in_specs, out_specs):
        options = {"mesh": self.mesh, "in_specs": in_specs, "check_vma": False}
        return jax.shard_map(function, **options, out_specs=out_specs)

    def _out_specs(self, inside, operands, in_specs, leaves, known):
        """Returns the specs of the results, whose structure is found by tracing."""
        found = []

        def outlined(*operands):
            own, after = inside(*operands)
            specs = [
                leaf.sum_spec(x) if self.entry.sums else leaf.out_spec(_bare(x))
                for leaf, x in zip(leaves, own, strict=True)
            ]
            found.append((specs, state_specs(after, known)))

        # Only a full trace of the exchange shows whether rows stay rows.
        listed = any(is_row_grads(_bare(leaf.value)) for leaf in leaves)
        token = OUTLINE.set(not listed)
        try:
            jax.eval_shape(self._mapped(outlined, in_specs, None), *operands)
        finally:
            OUTLINE.reset(token)
        return found[0]

    def _known(self, structure, leaves, of_shards=False):
        """Returns the specs of arrays that have the shapes of parameters, or of shards."""
        specs = [PartitionSpec(*leaf.sum.own) for leaf in leaves]
        shapes = [leaf.shape for leaf in leaves]
        if not of_shards:
            pairs = zip(shapes, leaves, strict=True)
            shapes = [whole_shape(shape, leaf.sum, self.mesh) for shape, leaf in pairs]
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return ParameterSpecs.of(structure.unflatten(shapes), structure.unflatten(specs))


def _check_mean(name, updates):
    """Raises if partial sums would be averaged."""
    nodes = jax.tree.leaves(updates, is_leaf=is_per_replica)
    if all(map(is_per_replica, nodes)):
        return
    raise ArgumentError(
        f"update of {name} under jit: partial sums of a gradient add up to it, and "
        "reduce='mean' would divide it by the number of ranks once more. Write "
        "sparsejax.zen_sync(..., reduce='sum'), and in the same way of other "
        "synchronizations."
    )


def _is_on_mesh(x):
    return (
        isinstance(x, jax.Array)
        and not isinstance(x, Tracer)
        and isinstance(x.sharding, NamedSharding)
    )


def _marked(leaf):
    """Returns a leaf; one of rows has its origin set anew, to the ids outside."""
    if not is_row_grads(leaf):
        return leaf
    return dataclasses.replace(leaf, origin=Origin(leaf.ids))


def _bare(leaf):
    return leaf.value if is_per_replica(leaf) else leaf
