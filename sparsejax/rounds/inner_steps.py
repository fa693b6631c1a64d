"""The steps between two exchanges: each is one step of every rank's own optimizer.

Nothing is sent. Inside `shard_map` a rank has its own row of the offsets and of the
optimizer's state, and takes one step (`OnRank`).

Under `jit` the arrays of all ranks are stacked, [ranks, ...], sharded over their axis, and
the step is a `vmap` over it (`Stacked`). Shards over a fast axis are left to XLA, so that a
reduction of an optimizer over a whole gradient, such as its norm, is also over that axis,
and over no other.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sparsejax import axes
from sparsejax.axes import AxisName, axis_names
from sparsejax.errors import ArgumentError
from sparsejax.rounds.checks import UPDATE, check_kind
from sparsejax.rounds.fragments import Fragments
from sparsejax.rounds.reading import moved, moved_stack, spec_of, stacked
from sparsejax.state import sharded, tree
from sparsejax.state.parameters import ParameterSpecs, of_per_rank, ranks_of
from sparsejax.state.per_rank import RankState, by_rank, check_like, check_ranks
from sparsejax.state.per_replica import PerReplica, is_per_replica
from sparsejax.transforms import checks
from sparsejax.transforms.entry.shards import ShardSum
from sparsejax.units.row_grads import is_row_grads
from sparsejax.wire.collectives import Wire


_HOW = (
    "Take gradients of the parameters that each rank has: sparsejax.per_replica("
    "jax.value_and_grad(loss_fn), axis_name, specs)(sparsejax.local(params, axis_name, "
    "opt_state), batch)"
)


class Moved(NamedTuple):
    """The arrays by rank that a step of the inner optimizer changes.

    Attributes:
        offset: The offset of each rank's parameters from the anchor.
        inner: The state of each rank's inner optimizer.
    """

    offset: RankState
    inner: RankState


def nothing_moved(params: Any, axis_name: AxisName) -> RankState:
    """Returns the offsets at the start of training, zeros, inside `shard_map`."""
    held = by_rank(params, axis_name)
    return RankState(held.value, axis_name, ranks=held.ranks)


def first_state(
    inner: optax.GradientTransformation, params: Any, offset: RankState, mesh: Any
) -> RankState:
    """Returns the first states of the inner optimizer, one for each rank.

    Args:
        inner: The optimizer.
        params: The parameters.
        offset: The first offsets.
        mesh: The mesh under `jit`; None inside `shard_map`.
    """
    axis_name, state = offset.axis_name, inner.init(params)
    if mesh is None:
        wire = Wire(axis_name)
        value = wire.per_rank(jax.tree.map(lambda x: jnp.asarray(x)[None], state))
        return RankState(value, axis_name, ranks=jnp.int32(wire.ranks))
    ranks = ranks_of(mesh, axis_name)
    state = jax.tree.map(jnp.asarray, state)
    one = lambda x: stacked(x, ranks, spec_of(x), axis_name, mesh)
    return RankState(jax.tree.map(one, state), axis_name, ranks=jnp.int32(ranks))


class OnRank(NamedTuple):
    """The inner steps of this rank, inside `shard_map`.

    Attributes:
        wire: The ranks.
    """

    wire: Wire

    def step(
        self,
        inner: optax.GradientTransformation,
        grads: Any,
        state: Moved,
        params: Any,
        extra: Mapping[str, Any],
    ) -> Moved:
        """Takes one step of this rank.

        Args:
            inner: The optimizer.
            grads: This rank's gradients.
            state: The offset and the optimizer's state before the step.
            params: The anchor.
            extra: Further arguments of the optimizer.
        """
        paths, leaves, structure = _flattened(grads)
        for path, leaf in zip(paths, leaves, strict=True):
            check_kind(path, leaf)
            # Without the state it would be the gradient at the anchor, which no type shows.
            local = f"sparsejax.local(params, {self.wire.axis!r}, opt_state)"
            axes.require_local(path, leaf, self.wire.axis, local=local)
        checks.check_replicated(params, self.wire.axis, UPDATE)
        check_ranks(state, self.wire.ranks)
        check_like(state.offset, paths, leaves, structure)
        own = jax.tree.map(lambda x: x[0], state.inner.value)
        updates, after = inner.update(grads, own, moved(params, state.offset), **extra)
        offset = jax.tree.map(_plus, state.offset.value, _with_axis(updates))
        after = self.wire.per_rank(_with_axis(after))
        return Moved(state.offset.with_value(offset), state.inner.with_value(after))

    def only(self, fragments: Fragments, number: int) -> "OnRank":
        """Returns the same for a fragment of the parameters."""
        del fragments, number
        return self

    def differences(self, offset: RankState) -> Any:
        """Returns anchor minus this rank's parameters; see `outer_steps.LocalRanks`."""
        return jax.tree.map(lambda x: -x[0], offset.value)


class Stacked(NamedTuple):
    """The inner steps of all ranks, stacked, under `jit`.

    Attributes:
        axis_name: The axis of the ranks.
        mesh: The mesh.
        specs: The PartitionSpecs of the parameters, in their order.
    """

    axis_name: AxisName
    mesh: Mesh | AbstractMesh
    specs: Sequence[PartitionSpec]

    @classmethod
    def of(cls, grads: Any, offset: RankState, mesh: Mesh | AbstractMesh) -> "Stacked":
        """Makes it of stacked gradients; raises, naming the leaf, if any is not."""
        paths, leaves, structure = _flattened(grads)
        for path, leaf in zip(paths, leaves, strict=True):
            if not is_per_replica(leaf):
                check_kind(path, leaf)
                raise ArgumentError(
                    f"{UPDATE} under jit: the gradient of {path!r} is one array for all "
                    f"ranks, and each has its own parameters. {_HOW}."
                )
            check_kind(path, leaf.value)
            if axis_names(leaf.axis_name) != axis_names(offset.axis_name):
                raise ArgumentError(
                    f"{UPDATE}: the gradient of {path!r} is stacked over "
                    f"{leaf.axis_name!r}, and the state is of ranks along "
                    f"{offset.axis_name!r}: give both the same axis."
                )
            if ShardSum(leaf.spec, axis_names(leaf.axis_name)).scatter is not None:
                raise ArgumentError(
                    f"{UPDATE}: the parameter {path!r} is sharded {leaf.spec}, over the "
                    "axis of the ranks, each of which trains the whole of it: shard it "
                    "over another axis, or replicate it."
                )
        check_ranks(offset, ranks_of(mesh, offset.axis_name), inside=False)
        like = [jax.ShapeDtypeStruct(x.value.shape[1:], x.value.dtype) for x in leaves]
        check_like(offset, paths, like, structure)
        return cls(offset.axis_name, mesh, [leaf.spec for leaf in leaves])

    def step(
        self,
        inner: optax.GradientTransformation,
        grads: Any,
        state: Moved,
        params: Any,
        extra: Mapping[str, Any],
    ) -> Moved:
        """Takes one step of every rank; see `OnRank.step`."""
        _, nodes, structure = _flattened(grads)
        anchors, rows = (structure.flatten_up_to(x) for x in (params, state.offset.value))
        own = [
            moved_stack(x, row, spec, self.axis_name, self.mesh)
            for x, row, spec in zip(anchors, rows, self.specs, strict=True)
        ]
        given = structure.unflatten([node.value for node in nodes])
        values = self._values(extra.get("value"))

        def inside(grads, state, params, value):
            own = extra if value is None else {**extra, "value": value}
            return inner.update(grads, state, params, **own)

        update = jax.vmap(inside, spmd_axis_name=self._auto_axes())
        given = given, state.inner.value, structure.unflatten(own), values
        updates, after = update(*given)
        offset = jax.tree.map(_plus, state.offset.value, updates)
        known = self._known(params, structure)
        return Moved(
            self._placed(state.offset.with_value(offset), known),
            self._placed(state.inner.with_value(after), known),
        )

    def only(self, fragments: Fragments, number: int) -> "Stacked":
        """Returns the same for a fragment of the parameters."""
        pairs = zip(self.specs, fragments.numbers, strict=True)
        return self._replace(specs=[spec for spec, own in pairs if own == number])

    def differences(self, offset: RankState) -> Any:
        """Returns anchor minus parameters of each rank; see `outer_steps.LocalRanks`."""
        leaves, structure = jax.tree.flatten(offset.value)
        return structure.unflatten(
            [
                PerReplica(-x, self.axis_name, spec, self.mesh)
                for x, spec in zip(leaves, self.specs, strict=True)
            ]
        )

    def _values(self, value):
        """Returns `value=` with a rank axis, as the losses of `per_replica` have; or None.

        Of all ranks' losses each optimizer takes its own. Other arguments are for all.
        """
        if not getattr(value, "ndim", 0):
            return None
        ranks = ranks_of(self.mesh, self.axis_name)
        if value.shape != (ranks,):
            raise ArgumentError(
                f"{UPDATE} under jit: value= has the shape {list(value.shape)}: give one "
                f"number for all ranks, or an array of {ranks}, one for each, as the "
                "losses that sparsejax.per_replica returns."
            )
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if kinds[axis_names(self.axis_name)[0]] != AxisType.Explicit:
            return value
        # All operands of `vmap` must be sharded over the ranks, as the gradients are.
        return jax.reshard(value, NamedSharding(self.mesh, PartitionSpec(self.axis_name)))

    @property
    def _is_auto(self):
        return AxisType.Explicit not in self.mesh.axis_types

    def _auto_axes(self):
        """Returns the axis of the ranks if the mesh has no Explicit axes, else None."""
        return self.axis_name if self._is_auto else None

    def _known(self, params, structure):
        """Returns the paths and specs of the parameters."""
        return ParameterSpecs.of(params, structure.unflatten(self.specs))

    def _placed(self, held, known):
        """Constrains arrays by rank to their shardings on Auto axes: XLA may move them.

        On Explicit axes types keep them in place.
        """
        if not self._is_auto:
            return held
        put = lambda x, spec: jax.lax.with_sharding_constraint(
            x, NamedSharding(self.mesh, spec)
        )
        return held.with_value(
            jax.tree.map(put, held.value, of_per_rank(held, known).value)
        )


def _plus(offset, update):
    """Adds an update to an offset, in the dtype of the offset."""
    return offset + update.astype(offset.dtype)


def _with_axis(values):
    """Adds the leading axis of the ranks to a rank's arrays."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], values)


def _flattened(grads):
    """Returns the paths, the leaves and the structure of gradients of any kind."""
    is_leaf = lambda x: (
        is_per_replica(x) or is_row_grads(x) or tree.is_sparse(x) or sharded.is_sharded(x)
    )
    pairs, structure = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_leaf)
    paths = [tree.written(keys) for keys in tree.unboxed([keys for keys, _ in pairs])]
    return paths, [leaf for _, leaf in pairs], structure
