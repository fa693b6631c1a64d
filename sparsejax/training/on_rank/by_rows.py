"""Gradients by rows in a train step: of those tables that the optimizer updates by rows."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax.axes import AxisName
from sparsejax.errors import LeafError, SparsejaxError
from sparsejax.rows import Capacity, Lazy, within_capacity
from sparsejax.state import sharded, tree
from sparsejax.state.observing import Observed
from sparsejax.training.on_rank.shares import Share
from sparsejax.units.row_grads import is_row_grads


def takes_rows(seen: Observed) -> frozenset[str]:
    """Returns the paths of the leaves whose gradients a chain accepts as `RowGrads`.

    A transformation that updates rows reports its leaves when it is observed
    (`observing.report_rows`). It must follow a synchronization that sums the leaf by a
    lossless scheme, and no transformation that needs whole arrays, such as a
    sparsifier, may precede or enclose that synchronization.

    Args:
        seen: The result of `observing.observed` for the chain.
    """
    taken: set[str] = set()
    for part in seen.rows:
        summed: set[str] = set()
        for exchange in seen.exchanges[: part.exchanges_before]:
            if all(wrapper.takes_rows for wrapper in exchange.inside):
                lossless = [each for each in exchange.buckets if not each.is_lossy]
                summed.update(exchange.shards, *(bucket.paths for bucket in lossless))
        taken |= summed & set(part.paths)
    sparsified = {path for part in seen.sparsifiers for path in part.paths}
    return frozenset(taken - sparsified)


def reader(seen: Observed, params: Any, opt_state: Any) -> Any:
    """Returns the reader of tables whose rows may have missed steps, or None.

    Args:
        seen: The result of `observing.observed` for the chain.
        params: The parameters.
        opt_state: The chain's state.
    """
    lazy = [x.part for x in seen.rows if x.paths and isinstance(x.part, Lazy)]
    return lazy[0].reader(params, opt_state) if lazy else None


def caught_up(seen: Observed, params: Any, opt_state: Any) -> Any:
    """Returns the parameters with all rows caught up."""
    read = reader(seen, params, opt_state)
    if read is None:
        return params
    paths, _, structure = tree.flatten(params)
    return structure.unflatten(read.whole(paths))


def only(grads: Any, paths: frozenset[str]) -> Any:
    """Makes `RowGrads` dense, except for leaves of the given paths."""
    if any(not is_sent for is_sent in sharded.are_sent(grads)):
        shards = sharded.apart(grads)  # gradients that embrace_sync sends are unchanged
        return shards.together(only(shards.rest, paths), shards.nodes)
    names, leaves, structure = tree.flatten(grads, rows=True)
    kept = [
        leaf if path in paths else tree.to_dense(leaf)
        for path, leaf in zip(names, leaves, strict=True)
    ]
    return structure.unflatten(kept)


def scaled(grads: Any, share: Share) -> Any:
    """Scales gradients so that their plain mean over the ranks is the weighted mean.

    A rank of weight 0 lists no rows. Gradients of `Sharded` parameters are unchanged: they
    are sums over the ranks already, of gradients that were `weighted`.
    """

    def one(leaf):
        if sharded.is_sharded(leaf) or share.weight is None:
            return leaf
        return share.weight.of_leaf(leaf)

    is_leaf = lambda leaf: is_row_grads(leaf) or sharded.is_sharded(leaf)
    return jax.tree.map(one, grads, is_leaf=is_leaf)


def weighted(params: Any, share: Share) -> Any:
    """Adds this rank's weight to `Sharded` parameters, for a loss.

    The backward pass of the loss sums their gradients over the ranks, with these weights.
    """
    if share.weight is None:
        return params
    weight = share.scaled(jnp.float32(1))
    one = lambda node: node.with_weight(weight) if sharded.is_sharded(node) else node
    return jax.tree.map(one, params, is_leaf=sharded.is_sharded)


def updated(
    tx: optax.GradientTransformation,
    grads: Any,
    state: Any,
    params: Any,
    extra: dict[str, Any],
) -> tuple[Any, Any]:
    """Calls the update of a chain; raises an error by name if a part accepts no rows."""
    try:
        return tx.update(grads, state, params, **extra)
    except (TypeError, ValueError) as error:
        paths, leaves, _ = tree.flatten(grads, rows=True)
        pairs = zip(paths, leaves, strict=True)
        listed = [path for path, leaf in pairs if is_row_grads(leaf)]
        if isinstance(error, SparsejaxError) or not listed:
            raise
        arrays = jax.tree.map(tree.to_dense, grads, is_leaf=is_row_grads)
        if not _takes(tx, arrays, state, params, extra):
            raise  # dense gradients fail as well, so rows are not the reason
        raise LeafError(
            f"the gradient of {listed[0]!r} is RowGrads, since sparsejax.lazy takes the "
            "rows that a loss has read, and something else in the chain fails with them. "
            "What needs whole arrays, as optax.clip_by_global_norm and "
            "add_decayed_weights do, cannot stand beside lazy: put what looks at each "
            "row alone into lazy(...), and clip by sparsejax.transforms.clip_by_rank in "
            f"front of the synchronization. {type(error).__name__}: {error}"
        ) from error


def _takes(tx, grads, state, params, extra):
    """Returns whether the update of a chain accepts gradients, without an error."""
    try:
        tx.update(grads, state, params, **extra)
    except (TypeError, ValueError):
        return False
    return True


def bounded(
    update: Callable[..., Any], capacity: Capacity, axis_name: AxisName
) -> Callable[..., Any]:
    """Makes an update of parameters and state that runs `within_capacity`."""
    known = {"capacity": capacity, "axis_name": axis_name}
    return functools.partial(within_capacity, update, **known)
