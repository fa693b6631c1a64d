"""Checks of what an exchange and its memory are given: leaves, and their states."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax import axes
from sparsejax.axes import AxisName
from sparsejax.errors import ArgumentError, StateError
from sparsejax.transforms.buckets import Bucket
from sparsejax.transforms.state import sharded, tree
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
            f"{type(bucket.scheme).__name__}, or for another number of ranks. "
            + axes.hint_of_whole()
            + "Make it with the transformation that updates it; "
            "sparsejax.residuals(state) is what the old one held."
        )


def check_shards(lossy: Any, memory: Any, given: Any) -> None:
    """Raises where a part that ranks share out would be given no velocity.

    Args:
        lossy: What sends and leaves out; a `Lossy`.
        memory: Its memory, if it has one.
        given: The parameters, or the gradients.
    """
    if memory is not None and memory.has_momentum:
        sharded.refuse(
            given,
            f"{lossy.name} with memory={memory!r}",
            "and has no velocity: it would be trained without momentum. Let the optimizer "
            "behind have the momentum, with memory=Residual() (of dgc and of systems such "
            "as ok_topk_sync momentum=None, of sync feedback=Residual()), or give tables a "
            "chain of their own by optax.partition: optax.chain(sparsejax.dense_sync(), "
            "optax.sgd(0.1, momentum=0.9)).",
        )


def check_velocities(
    lossy: Any, paths: Sequence[str], leaves: Sequence[Any], moving: Sequence[bool]
) -> None:
    """Raises where a leaf that has a velocity comes by its entries or rows.

    Args:
        lossy: What sends and leaves out; a `Lossy`.
        paths: The leaves' paths.
        leaves: The gradients.
        moving: Whether each leaf has a velocity.
    """
    for path, leaf, moves in zip(paths, leaves, moving, strict=True):
        if moves and (tree.is_sparse(leaf) or is_row_grads(leaf)):
            raise ArgumentError(
                f"leaf {path!r} is {type(leaf).__name__}, and with MomentumCorrection "
                f"{lossy.name} keeps its velocity in an array as large as the parameter: "
                "let the optimizer behind have the momentum, with feedback=Residual() (of "
                "systems such as ok_topk_sync momentum=None), or give the leaf a chain of "
                "its own by optax.partition."
            )


def check_memory(lossy: Any, memory: Any, needs: bool, moves: bool, state: Any) -> None:
    """Raises where the state has no residual and one is needed, or the other way round.

    Args:
        lossy: What sends and leaves out; a `Lossy`.
        memory: Its memory, if it has one.
        needs: Whether any leaf needs a residual.
        moves: Whether any leaf has a velocity.
        state: The state of `feedback`.
    """
    if needs != (state.residual is not None):
        raise StateError(
            f"the state of {lossy.name} was made for another scheme or memory: it "
            + ("holds nothing back" if needs else "holds something back")
            + ", and the transformation does"
            + (". " if needs else " not. ")
            + "Make it with the transformation that updates it."
        )
    if moves != (state.momentum is not None):
        raise StateError(
            f"{lossy.name} has memory={memory!r}, and the state was made with another."
        )
