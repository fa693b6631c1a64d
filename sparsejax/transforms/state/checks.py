"""What a synchronization is given, checked against what it is."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.errors import ArgumentError, StateError
from sparsejax.transforms import buckets as leaf_rules
from sparsejax.transforms.buckets import Group
from sparsejax.transforms.state.per_rank import SyncState, check_ranks


def check_sparse(groups: Sequence[Group], leaves: Sequence[Any]) -> None:
    """Raises where a scheme that chooses what it sends is given what was chosen."""
    for group in groups:
        for i, path in zip(group.leaves, group.paths, strict=True):
            if group.scheme.selects and leaf_rules.is_sparse(leaves[i]):
                raise ArgumentError(
                    f"the gradient of {path!r} is sparse already, and "
                    f"{type(group.scheme).__name__} chooses for itself what it sends: two "
                    "memories would each keep what the other has sent. Leave the "
                    "sparsifier out, or use a lossless scheme such as sparsejax.zen_sync()."
                )


def check_state(groups: Sequence[Group], state: SyncState, every: int, ranks: int) -> None:
    """Raises if the state was made for other leaves, options, or ranks."""
    names = [group.name for group in groups]
    if set(names) != set(state.traffic):
        raise StateError(
            "the gradients do not match the state: they form the groups "
            f"{sorted(names)}, the state has {sorted(state.traffic)}. Leaves are grouped "
            "by path, size, dtype and the mesh axes over which they vary. Make the state "
            "from parameters like the gradients: of the same dtypes, and where a second "
            "mesh axis shards them, with sparsejax.init(..., param_specs=...) and the "
            "check_vma of the shard_map in which update runs."
        )
    if (every > 1) != (state.pending is not None):
        raise StateError(
            f"every={every}, but the state "
            + ("holds no" if every > 1 else "holds")
            + " accumulated gradients: it was made with another `every`."
        )
    keeps = any(group.scheme.keeps_residual for group in groups)
    if keeps != (state.residual is not None):
        raise StateError(
            "the state was made for another scheme: it "
            + ("holds nothing back" if keeps else "holds something back")
            + ", and the scheme does"
            + (". " if keeps else " not. ")
            + "Make it with the transformation that updates it."
        )
    for group in groups:
        own = state.schemes[group.name]
        if not group.scheme.selects:
            continue
        like = jax.ShapeDtypeStruct((sum(group.units),), jnp.float32)
        want = jax.eval_shape(lambda like=like, g=group: g.scheme.init(like, ranks))
        if type(getattr(own, "value", own)) is not type(want):
            raise StateError(
                f"the state of {group.name!r} was made by another scheme than "
                f"{type(group.scheme).__name__}. Make it with the transformation that "
                "updates it; sparsejax.residuals(state) is what the old one held."
            )
    check_ranks((state.pending, state.residual), ranks)
