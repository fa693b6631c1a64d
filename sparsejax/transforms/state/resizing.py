"""A state for another number of ranks: what was held goes to those there are.

Nothing goes over a wire: this works on whole states, between two runs, as when a checkpoint
of eight hosts is continued on four.
"""

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.errors import StateError
from sparsejax.transforms.exchange import ExchangeState
from sparsejax.transforms.state.per_rank import PerRank
from sparsejax.transforms.wrappers import check_reduce
from sparsejax.units.dtypes import wide


def resized(state: Any, like: Any, *, reduce: str = "mean") -> Any:
    """A state as if it had been built up on another number of ranks.

    What ranks hold back, or have gathered so far, is spread evenly over the new ones, so
    that all of it reaches the parameters as before. What schemes remember of how they went
    is that of the fresh state: thresholds are found, and regions bounded, anew. All else is
    kept.

    Example:
        >>> # state was saved by eight ranks, mesh has four
        >>> fresh = sparsejax.init(tx, params, mesh)
        >>> state = sparsejax.resized(state, like=fresh)

    Args:
        state: The state, whole, as a checkpoint gives it back.
        like: A fresh one for the new ranks, from the same transformation and parameters.
        reduce: What the synchronization is given. A mean over fewer ranks weighs each more,
            so what each of them gets is what each had on average; of a sum it is a share.

    Returns:
        The new state, placed as `like` is.
    """
    check_reduce(reduce)
    ours = lambda node: isinstance(node, (PerRank, ExchangeState))
    old, structure = jax.tree.flatten(state, is_leaf=ours)
    new, other = jax.tree.flatten(like, is_leaf=ours)
    if structure != other:
        raise StateError(
            "the two states are of different transformations, or of other parameters: make "
            "`like` with the one and the parameters with which the state was made."
        )

    def placed(x, fresh):
        x = jnp.asarray(x, fresh.dtype)
        if x.shape != fresh.shape:
            raise StateError(
                f"the state has an array of shape {list(x.shape)} where the fresh one has "
                f"{list(fresh.shape)}, and it does not differ by rank: they were made for "
                "other parameters."
            )
        return jax.device_put(x, fresh.sharding)

    def average(x, fresh):
        return spread(x, fresh, mean=True)

    def spread(x, fresh, mean=reduce == "mean"):
        if x.shape[1:] != fresh.shape[1:]:
            raise StateError(
                f"what ranks hold has the shape {list(x.shape[1:])}, in the fresh state "
                f"{list(fresh.shape[1:])}: they were made for other parameters."
            )
        if x.shape == fresh.shape:
            return placed(x, fresh)
        share = jnp.sum(jnp.asarray(x, wide(fresh.dtype)), axis=0)
        share = share / (len(x) if mean else len(fresh))
        return placed(jnp.broadcast_to(share, fresh.shape), fresh)

    def node(x, fresh):
        if isinstance(x, PerRank):
            # What is about leaves, such as a threshold, is theirs and no share of them.
            by = spread if x.paths is None else average
            return x.with_value(jax.tree.map(by, x.value, fresh.value))
        if isinstance(x, ExchangeState):
            # Thresholds, regions and tables are those of the fresh state.
            return fresh
        return placed(x, fresh)

    return structure.unflatten([node(x, y) for x, y in zip(old, new, strict=True)])
