"""Resizes a state to another number of ranks, which receive the residuals of the old ones.

Nothing is sent: it takes whole states, between two runs, as when a run of eight hosts is
continued on four from a checkpoint. Each process computes from its own copy.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sparsejax import arguments
from sparsejax.errors import ArgumentError, StateError
from sparsejax.state import sharded, tree
from sparsejax.state.by_owner import ByOwner
from sparsejax.state.pending import Pending, Period, is_pending
from sparsejax.state.per_rank import PerRank, check_whole, find
from sparsejax.transforms.exchange import ExchangeState
from sparsejax.units.units import wide


def resized(state: Any, like: Any, *, reduce: str | None = None) -> Any:
    """Returns a state for another number of ranks.

    Residuals and accumulated gradients are distributed evenly over the new ranks, so that
    all of them reach the parameters. Residuals of sums, which owners keep for
    `sparsejax.chunked_sync`, go to the new owners. The states of schemes are those of the
    new state: thresholds and regions are computed again. All else is kept.
    `sparsejax.restore` calls it by itself.

    A round of `sparsejax.local_steps` continues: the anchor, the outer optimizer and the
    number of steps are kept. Each new rank begins with the mean of the old ranks' offsets
    and inner moments. So the mean of the offsets is kept, and their differences are lost.
    Variables that a trainer keeps by rank are averaged, too. Of both, values that are not
    floating-point, such as a count or a PRNG key, new rank r takes from old rank r modulo
    the number of old ranks.

    Args:
        state: The whole state, as a checkpoint of orbax returns it when restored into
            `sparsejax.abstract_state(tx, params, mesh, ranks=...)`.
        like: A new state for the new ranks, from the same transformation and parameters.
        reduce: "mean" or "sum", the `reduce` of the synchronization, if the state does not
            record it. In a mean over fewer ranks each has a larger weight. So with "mean" a
            new rank gets the mean of the old ranks, with "sum" an equal share of their sum.

    Returns:
        The new state, placed as `like` is.

    Raises:
        ArgumentError: A state has shapes without arrays, `like` is not on devices, or
            `reduce` differs from that of the synchronization.
        StateError: The states are of different transformations or parameters, a part of
            the state cannot be moved to other ranks, or this process has only a part.

    Example:
        >>> fresh = sparsejax.init(tx, params, mesh)  # of four ranks
        >>> state = sparsejax.resized(state, like=fresh)  # it was saved by eight

    See Also:
        `sparsejax.restore`: reads a checkpoint, and calls this.
        `sparsejax.save`: writes a checkpoint.
        `sparsejax.abstract_state`: the target to restore a checkpoint of orbax's own into.
    """
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((state, like))):
        raise ArgumentError(
            "resized takes states with their arrays, and got one of jax.ShapeDtypeStruct, "
            "as sparsejax.abstract_state makes them: restore into that, and let `like` be "
            "sparsejax.init(tx, params, mesh)."
        )
    _check_on_devices(like)
    mean = _is_mean(like, reduce)
    check_whole(state)
    kinds = (PerRank, ExchangeState, Pending, sharded.Sharded)
    ours = lambda node: isinstance(node, kinds)
    _check_tables(state, like)
    _check_periods(state, like)
    old, structure = jax.tree_util.tree_flatten_with_path(state, is_leaf=ours)
    new, other = jax.tree.flatten(like, is_leaf=ours)
    if structure != other:
        raise StateError(
            "the two states are of different transformations, or of other parameters: make "
            "`like` with the one and the parameters with which the state was made. A "
            "checkpoint that was restored without a target is made of dicts and lists: "
            "restore it into sparsejax.abstract_state(tx, params, mesh, ranks=...)."
        )

    def node(keys, x, fresh):
        if isinstance(x, ByOwner):
            return x.resized(fresh, _whole, tree.written(keys))
        if isinstance(x, PerRank):
            _check_columns(x, fresh)
            # A rank's own value, such as a variable, or one that is derived from leaves,
            # such as a threshold, is no share of a sum.
            is_value = x.is_own or x.paths is not None
            spread = _averaged if is_value else _spread(mean)
            value = jax.tree_util.tree_map_with_path(spread, x.value, fresh.value)
            return fresh.with_value(value)
        if is_pending(x):
            return x.resized(fresh, mean, _whole, tree.written(keys))
        if sharded.is_sharded(x):
            return jax.tree_util.tree_map_with_path(_fitted(x, keys), x, fresh)
        if isinstance(x, ExchangeState):
            _check_reduction(x, fresh)
            # Thresholds, regions and tables are those of the fresh state.
            place = lambda x, y: _placed(
                tree.written(keys), _whole(tree.written(keys), x), y
            )
            return fresh._replace(totals=jax.tree.map(place, x.totals, fresh.totals))
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return jax.device_put(x, fresh.sharding)
        return _placed(tree.named(keys), _whole(tree.named(keys), x), fresh)

    pairs = zip(old, new, strict=True)
    return structure.unflatten([node(keys, x, y) for (keys, x), y in pairs])


def _check_on_devices(like):
    """Raises unless all arrays of the fresh state say where those of the new one go."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(like):
        if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array):
            what = f"{type(leaf).__name__}, which is on none"
            what = "being traced" if isinstance(leaf, Tracer) else what
            where = f"its leaf {tree.named(keys)!r}" if keys else "it"
            raise ArgumentError(
                "resized places the new state as `like` is placed, whose leaves are arrays "
                f"on devices, and {where} is {what}: let `like` be trainer.init(params) or "
                "sparsejax.init(tx, params, mesh), called outside of jit."
            )


def _is_mean(like, reduce):
    """Whether sums are averages over ranks, from `reduce` or the exchanges of a state."""
    seen = {exchange.reduction.mean for exchange in find(like, ExchangeState)}
    if reduce is not None:
        arguments.check_reduce(reduce)
        if seen and seen != {reduce == "mean"} and len(seen) == 1:
            other = "mean" if seen == {True} else "sum"
            raise ArgumentError(
                f"reduce={reduce!r} was given, and the synchronization of `like` has "
                f"reduce={other!r}: leave it out."
            )
        return reduce == "mean"
    if len(seen) > 1:
        raise ArgumentError(
            "`like` has synchronizations with reduce='mean' and with reduce='sum': resize "
            "their states one by one, or say which, reduce='mean' or 'sum'."
        )
    return seen != {False}


def _check_reduction(old, fresh):
    """Raises if one of two exchanges averages over the ranks, and the other adds."""
    if old.reduction == fresh.reduction:
        return
    was, now = ("mean" if x.reduction.mean else "sum" for x in (old, fresh))
    raise StateError(
        f"the state was built up with reduce={was!r}, and `like` has reduce={now!r}: what "
        "ranks hold would reach the parameters with another weight. Make `like` with the "
        f"transformation that made the state, reduce={was!r}."
    )


def _spread(mean):
    """Returns a function that spreads an array by rank evenly over the new ranks.

    Args:
        mean: Whether each new rank gets the mean of the old ranks; else each gets an equal
            share of their sum.
    """

    def spread(keys, x, fresh):
        path = tree.named(keys)
        x = _whole(path, x)
        if x.shape[1:] != fresh.shape[1:]:
            raise StateError(
                f"what ranks hold of {path!r} has the shape {list(x.shape[1:])}, in the "
                f"fresh state {list(fresh.shape[1:])}: they were made for other parameters."
            )
        if x.shape != fresh.shape:
            share = np.sum(np.asarray(x, wide(fresh.dtype)), axis=0)
            share = share / (len(x) if mean else len(fresh))
            x = np.broadcast_to(share, fresh.shape)
        return _placed(path, x, fresh)

    return spread


def _averaged(keys, x, fresh):
    """Gives the new ranks the mean of an array of ranks' own values, if it is floating.

    Otherwise, as for counts and PRNG keys, new rank r gets the value of old rank r modulo
    their number.
    """
    if jnp.issubdtype(x.dtype, jnp.floating):
        return _spread(mean=True)(keys, x, fresh)
    path, from_ranks = tree.named(keys), np.arange(len(fresh)) % len(x)
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return _placed(path, _whole(path, x)[from_ranks], fresh)
    numbers = _whole(path, jax.random.key_data(x))[from_ranks]
    own = jax.random.wrap_key_data(jnp.asarray(numbers), impl=jax.random.key_impl(x))
    return jax.device_put(own, fresh.sharding)


def _check_tables(state, like):
    """Raises if a sharded table has another width or axis in the fresh state."""
    old, new = sharded.apart(state), sharded.apart(like)
    if old.paths != new.paths:
        return  # the structures differ, too
    for path, node, fresh in zip(old.paths, old.nodes, new.nodes, strict=True):
        for name in ("dim", "axis_name"):
            was, now = getattr(node, name, None), getattr(fresh, name, None)
            if was != now:
                raise StateError(
                    f"the state has at {path!r} a table with {name}={was!r}, and `like` "
                    f"has {name}={now!r}: make `like` with tables as those of the state, "
                    "sparsejax.ColumnTable.of(table.whole(), mesh, axis_name) of its own "
                    "parameters."
                )


def _check_periods(state, like):
    """Raises if a state holds something back for other numbers of steps than `like`."""
    for own, fresh in zip(find(state, Period), find(like, Period), strict=False):
        fresh.check(own, "the transformation of `like`")


def _check_columns(old, fresh):
    """Raises where other ranks would be given sums of the columns of a table."""
    tables = sharded.apart(old.value)
    shapes = [[x.shape for x in jax.tree.leaves(held.value)] for held in (old, fresh)]
    if tables.paths and shapes[0] != shapes[1]:
        raise StateError(
            f"the state has sums of gradients of the table {tables.paths[0]!r}, each rank "
            "those of its own columns, as sparsejax.accumulate keeps them, and other ranks "
            "have other columns: continue on as many ranks as before."
        )


def _fitted(node, place):
    """Returns a function that pads, or cuts, an array of a sharded table for new ranks."""

    def one(keys, x, fresh):
        path = tree.named((*place, *keys))
        return _placed(path, node.fitted(_whole(path, x), fresh.shape), fresh)

    return one


def _whole(path, x):
    """Returns the whole array as a NumPy array; raises if this process has only a part."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            raise StateError(
                f"of {path!r}, {list(x.shape)}, this process has a part: other processes "
                "have the rest. Restore the state with every process having all of it: "
                "sparsejax.abstract_state(tx, params, mesh, ranks=...) is placed so."
            )
        x = x.addressable_data(0)
    return np.asarray(x)


def _placed(path, x, fresh):
    """Returns an array with the dtype and the sharding of the fresh one."""
    x = x.astype(fresh.dtype)
    if x.shape != fresh.shape:
        raise StateError(
            f"the state has at {path!r} an array of shape {list(x.shape)} where the fresh "
            f"one has {list(fresh.shape)}, and it does not differ by rank: they were made "
            "for other parameters."
        )
    return jax.make_array_from_callback(x.shape, fresh.sharding, lambda index: x[index])
