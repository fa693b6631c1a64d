"""Checks of what an exchange is given: its leaves, and the states of its schemes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import axes
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError, StateError
from sparsejax.transforms.buckets import Bucket
from sparsejax.transforms.state import tree
from sparsejax.transforms.state.per_rank import PerRank
from sparsejax.units.row_grads import is_row_grads
from sparsejax.wire import Wire


def check_leaves(
    paths: Sequence[str], leaves: Sequence[Any], buckets: Sequence[Bucket], axis: AxisName
) -> None:
    """Raises where a gradient is summed already, or not of a kind that its scheme takes.

    Args:
        paths: The leaves' paths.
        leaves: The gradients.
        buckets: How they are to be summed.
        axis: The mesh axis of the ranks.
    """
    for path, leaf in zip(paths, leaves, strict=True):
        axes.require_local(path, tree.numbers(leaf), axis)
        if tree.is_sparse(leaf):
            _check_origin(path, leaf)
        if tree.is_sparse(leaf) or is_row_grads(leaf):
            leaf.check(path)
    for bucket in buckets:
        for i, path in zip(bucket.leaves, bucket.paths, strict=True):
            if bucket.is_lossy:
                _check_dense(path, leaves[i], type(bucket.scheme).__name__)


def _check_dense(path, leaf, name):
    """Raises where a scheme that leaves something out is given entries or rows."""
    if is_row_grads(leaf):
        raise ArgumentError(
            f"leaf {path!r} is RowGrads, and {name} keeps what it leaves out in an array "
            "as large as the table: sum it by a lossless scheme, such as "
            "sparsejax.zen_sync() or a rule {path: sparsejax.schemes.Zen()}, or make the "
            "leaf dense with its method to_dense()."
        )
    if tree.is_sparse(leaf):
        raise ArgumentError(
            f"the gradient of {path!r} is sparse already, and {name} leaves something out "
            "by itself: two memories would each keep what the other has sent. Leave the "
            "sparsifier out, or use a lossless scheme such as sparsejax.zen_sync()."
        )


def _check_origin(path, leaf):
    """Raises where the indices are not those that a sparsifier selected."""
    if leaf.origin.is_changed(leaf.indices):
        raise ArgumentError(
            f"between the sparsifier and the synchronization the indices of the selected "
            f"entries of {path!r} were changed: optax.scale, and all that computes with "
            "every array of the gradients, computes with them, too. Put it in front of the "
            "sparsifier, or behind the synchronization: optax.chain(sparsejax.dgc(0.01), "
            "sparsejax.zen_sync(), optax.scale(2.0))."
        )


def check_scheme_state(bucket: Bucket, state: Any, wire: Wire) -> None:
    """Raises unless the scheme made the state, for as many units and ranks."""
    given = state.value if isinstance(state, PerRank) else state
    if bucket.is_lossy:
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), given)
    like = bucket.like(jnp.float32)
    wanted = jax.eval_shape(lambda: bucket.scheme.init(like, wire))
    shapes = lambda tree: [jnp.shape(x) for x in jax.tree.leaves(tree)]
    same = jax.tree.structure(given) == jax.tree.structure(wanted)
    if not same or shapes(given) != shapes(wanted):
        raise StateError(
            f"the state of {bucket.name!r} was made by another scheme than "
            f"{type(bucket.scheme).__name__}, or for another number of ranks. Make it with "
            "the transformation that updates it; sparsejax.residuals(state) is what the "
            "old one held."
        )
