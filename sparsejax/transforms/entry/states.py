"""The PartitionSpecs of a state, and the axes of shards, for an update under `jit`."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from sparsejax.axes import axis_names, mesh_of
from sparsejax.errors import StateError
from sparsejax.state import tree
from sparsejax.state.parameters import ParameterSpecs, of_per_rank
from sparsejax.state.per_rank import PerRank
from sparsejax.transforms.entry.incoming import spec_of
from sparsejax.transforms.entry.shards import ShardSum


def state_specs(state: Any, known: ParameterSpecs) -> Any:
    """Returns the specs of a state: `PerRank` by rank and shard, all else replicated."""
    is_ours = lambda node: isinstance(node, PerRank)

    def own(node):
        return of_per_rank(node, known) if is_ours(node) else PartitionSpec()

    return jax.tree.map(own, state, is_leaf=is_ours)


def check_state(state: Any, specs: Any) -> None:
    """Raises if an array of a state is not sharded as its gradient requires."""
    is_spec = lambda node: isinstance(node, PartitionSpec)
    pairs = jax.tree_util.tree_leaves_with_path(state)
    for (keys, leaf), spec in zip(
        pairs, jax.tree.leaves(specs, is_leaf=is_spec), strict=True
    ):
        mesh = mesh_of(leaf)
        if mesh is None or AxisType.Explicit not in mesh.axis_types:
            continue
        found = spec_of(leaf)
        if _stripped(found) != _stripped(spec):
            raise StateError(
                f"the state has at {tree.named(keys)!r} an array that is sharded {found}, "
                f"and the gradients ask for {spec}."
            )


def _stripped(spec):
    """Returns the parts of a spec without the empty ones at its end."""
    parts = [axis_names(part or ()) for part in spec]
    while parts and not parts[-1]:
        parts.pop()
    return parts


def shards_of(
    pairs: Sequence[tuple[Any, Any]], sums: Sequence[ShardSum]
) -> dict[str, frozenset[str]]:
    """Returns for the path of each leaf the axes over which it is sharded."""
    paths = map(tree.written, tree.unboxed([keys for keys, _ in pairs]))
    axes_of = (frozenset(own.axes) for own in sums)
    return dict(zip(paths, axes_of, strict=True))
