"""State that differs by rank, and the checks of any state before it is used.

A residual, or an accumulated gradient, is an array [ranks, ...] outside `shard_map`,
sharded over its leading axis, and [1, ...] inside. It is wrapped in `PerRank` to
distinguish it from replicated state: if its spec were `P()`, a checkpoint would keep one
rank's copy and lose the others. A residual is stored with the number of ranks for which it
was made: if a tool cuts the array to another shape, the number shows that rows were lost.
"""

import contextvars
import copy
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from sparsejax.axes import (
    AxisName,
    as_varying,
    axis_names,
    hint_of_whole,
    is_checking,
    varying_axes,
)
from sparsejax.errors import StateError
from sparsejax.state import tree
from sparsejax.units.units import wide
from sparsejax.wire.collectives import Wire


# Set for a dry run of a whole chain, in which `update` only returns the right types.
OUTLINE: contextvars.ContextVar[bool] = contextvars.ContextVar("outline", default=False)


@jax.tree_util.register_pytree_with_keys_class
class PerRank:
    """A pytree of arrays that differ by rank, each with a leading rank axis.

    Attributes:
        value: The pytree.
        axis_name: The mesh axis, or axes, of the ranks.
        paths: The paths of the leaves from which arrays such as thresholds were derived;
            None if the pytree has the structure of the parameters.
        same: Mesh axes over which those leaves are sharded, and the arrays are equal.
        ranks: int32, equal on all ranks: the number of ranks for which the arrays were
            made; None if nothing in them is still to be sent.
    """

    ranks: Any = None  # The default for states that were pickled without this attribute.
    #: Whether each array is one rank's own, so that sums over ranks have no meaning.
    is_own: bool = False
    #: Whether the axis after that of the ranks is the shards of the leaves in `paths`.
    is_divided: bool = False

    def __init__(
        self,
        value: Any,
        axis_name: AxisName,
        paths: tuple[str, ...] | None = None,
        same: tuple[str, ...] = (),
        ranks: Any = None,
    ):
        self.value = value
        self.axis_name = axis_name
        self.paths = paths
        self.same = same
        self.ranks = ranks

    def with_value(self, value: Any) -> Self:
        """Returns a copy with another value, for the same ranks."""
        other = copy.copy(self)
        other.value = value
        return other

    def specs(self, value: Any) -> Self:
        """Returns the PartitionSpecs of all its arrays, from those of `value`."""
        other = self.with_value(value)
        other.ranks = None if self.ranks is None else PartitionSpec()
        return other

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Flattens for JAX: arrays are children, the rest is part of the structure."""
        keys = [jax.tree_util.GetAttrKey(name) for name in ("value", "ranks")]
        children = zip(keys, (self.value, self.ranks), strict=True)
        return tuple(children), (self.axis_name, self.paths, self.same)

    @classmethod
    def tree_unflatten(cls, rest, children):
        """Unflattens for JAX."""
        value, ranks = children
        axis_name, paths, same = rest
        return cls(value, axis_name, paths, same, ranks)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r}, axis_name={self.axis_name!r})"


@jax.tree_util.register_pytree_with_keys_class
class RankState(PerRank):
    """The state of each rank's own optimizer, or the offset of its parameters.

    The end of an array's path, and its shape after the rank axis, determine to which
    parameter it belongs, as in the state of an optimizer that all ranks share. Nothing in
    it is still to be sent: on another number of ranks each gets a mean, not a share of a
    sum.
    """

    is_own = True


def by_rank(params: Any, axis_name: AxisName) -> PerRank:
    """Returns a `PerRank` of zeros like the parameters, in float32 or wider.

    Each array is [1, ...] on a rank; a masked leaf stays masked.
    """

    def zeros(leaf):
        if tree.is_masked(leaf):
            return leaf
        x = jnp.zeros((1, *leaf.shape), wide(leaf.dtype))
        return Wire(axis_name).per_rank(as_varying(x, varying_axes(leaf)))

    ranks = jnp.int32(Wire(axis_name).ranks)
    return PerRank(tree.map_leaves(zeros, params), axis_name, ranks=ranks)


def norm_over_ranks(
    held: Sequence[tuple[jax.Array, tuple[str, ...]]], wire: Wire
) -> jax.Array:
    """Returns the norm of arrays over all ranks, and over their shards.

    Args:
        held: For each array this rank's part, and the mesh axes over which it is sharded
            that types do not show.
        wire: The ranks.
    """
    by_axes: dict[frozenset[str], list[jax.Array]] = {}
    for x, shards in held:
        square = jnp.sum(jnp.square(x.astype(jnp.float32)))
        over = varying_axes(square) | {*shards} | frozenset(axis_names(wire.axis))
        by_axes.setdefault(over, []).append(square)
    total = jnp.float32(0)
    for over, squares in by_axes.items():
        total = (
            total + wire.along(tuple(sorted(over))).psum(sum(squares, jnp.float32(0)))[0]
        )
    # If neither types nor the caller name an axis of shards, the largest norm is taken.
    return jnp.sqrt(wire.same_elsewhere(total))


def check_ranks(state: Any, ranks: int, inside: bool = True) -> None:
    """Raises unless arrays by rank were made for this number of ranks.

    Args:
        state: The state of a transformation, or any tree.
        ranks: The number of ranks.
        inside: Whether it is called inside `shard_map`, where each rank has its own part.
    """
    for held in find(state, PerRank):
        for keys, leaf in jax.tree_util.tree_leaves_with_path(held.value):
            rows = leaf.shape[0]
            # Outside, a derived array has one piece for each rank and shard.
            is_derived = held.paths is not None and held.ranks is None
            if rows == (1 if inside else ranks) or (is_derived and not inside):
                continue
            name = tree.named((*keys, *map(jax.tree_util.DictKey, held.paths or ())))
            if inside and _has_all_ranks(leaf, held.axis_name, ranks):
                raise StateError(
                    f"of {name!r} each rank was given what all {rows} hold: the state was "
                    "passed to shard_map with the spec P(). Pass it with "
                    "sparsejax.state_specs(state) in in_specs and out_specs. "
                    f"{hint_of_whole()}".rstrip()
                )
            made = rows * ranks if inside else rows
            raise StateError(
                f"the state, by its {name!r}, was made for {made} ranks, and there are "
                f"{ranks}: sparsejax.resized(state, like=sparsejax.init(tx, params, mesh)) "
                f"gives what was held to those there are. {hint_of_whole()}".rstrip()
            )


def _has_all_ranks(leaf, axis_name, ranks):
    """Returns whether a rank was given the arrays of all ranks."""
    if not is_checking(axis_name):
        return leaf.shape[0] == ranks
    return not frozenset(axis_names(axis_name)) & varying_axes(leaf)


def check_like(
    held: PerRank | None, paths: Sequence[str], leaves: Sequence[Any], structure: Any
) -> None:
    """Raises if a state by rank was made for other leaves than those of the gradients.

    Args:
        held: A tree like the parameters, in which a leaf without state is masked; or None.
        paths: The paths of the gradients.
        leaves: The gradients.
        structure: The structure of their tree.
    """
    if held is None:
        return
    what = "the state was made for other parameters"
    fix = "Make it with those that are trained: sparsejax.init(tx, params, mesh)."
    try:
        rows = structure.flatten_up_to(held.value)
    except ValueError:
        pairs = jax.tree_util.tree_leaves_with_path(held.value, is_leaf=tree.is_masked)
        there = [tree.named(keys) for keys, _ in pairs]
        missing = [path for path in paths if path not in there]
        extra = [path for path in there if path not in paths]
        found = f"the gradients have {missing}, the state {extra}"
        if not missing and not extra:
            found = f"the gradients are {structure}, and the state is of other nodes"
        raise StateError(f"{what}: {found}. {fix}") from None
    for path, leaf, row in zip(paths, leaves, rows, strict=True):
        if not tree.is_masked(row) and row.shape[1:] != leaf.shape:
            raise StateError(
                f"{what}: in it {path!r} has the shape {list(row.shape[1:])}, its gradient "
                f"{list(leaf.shape)}. {fix}"
            )


def check_whole(state: Any) -> None:
    """Raises if the arrays of some ranks were lost, as by restoring a cut checkpoint.

    It reads values, so traced states and abstract ones pass unchecked.

    Args:
        state: The state of a transformation, or any tree, outside `shard_map`.
    """
    for held in find(state, PerRank):
        ranks = held.ranks
        if ranks is None or isinstance(ranks, (Tracer, jax.ShapeDtypeStruct)):
            continue
        made = int(np.asarray(ranks))
        for keys, leaf in jax.tree_util.tree_leaves_with_path(held.value):
            if leaf.shape[0] != made:
                raise StateError(
                    f"the state was made for {made} ranks, and holds {leaf.shape[0]} rows "
                    f"for {tree.named(keys)!r}: the others were lost on the way, as with "
                    "orbax's strict=False. Restore it into "
                    f"sparsejax.abstract_state(tx, params, mesh, ranks={made}), and give "
                    "what comes back to sparsejax.resized(state, like=sparsejax.init(tx, "
                    "params, mesh))."
                )


def find(state: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """Returns all nodes of a type inside an optimizer state, however deeply nested."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def check_kind(state: Any, kind: type, what: str) -> None:
    """Raises unless a transformation was given a state of its own type.

    Args:
        state: The state.
        kind: The type of state that the transformation makes.
        what: The transformation, for the message.
    """
    if isinstance(state, kind):
        return
    raise StateError(
        f"{what} was given {_kind_of(state)}, and makes {kind.__name__}: the state was "
        f"made with another transformation, or with other options. Make it with the "
        "transformation that updates it: sparsejax.init(tx, params, mesh)."
    )


def _kind_of(state):
    return "no state" if state is None else f"a {type(state).__name__}"
