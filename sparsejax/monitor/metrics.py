"""Metrics of a state as scalars, and its residuals as a tree."""

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.errors import StateError
from sparsejax.schemes.base import Traffic
from sparsejax.state import tree
from sparsejax.state.per_rank import find
from sparsejax.transforms.exchange import ExchangeState
from sparsejax.transforms.feedback import FeedbackState
from sparsejax.transforms.wrappers import AccumulateState, SkipState


def residuals(state: Any) -> Any:
    """Returns the residuals of all ranks, as a tree like the parameters.

    A residual is the part of a gradient that a rank has not sent yet, for a sparsifier or a
    lossy scheme. If a sparsifier sends a leaf whole, its residual is the error of rounding
    to its dtype, mostly zeros. A leaf whose scheme is lossless is an `optax.MaskedNode`. If
    several transformations each have some of the leaves (`optax.masked`,
    `optax.partition`), the result is one tree of all leaves.

    Args:
        state: An optimizer state, in which transformations may be chained, masked or
            partitioned.

    Returns:
        The tree. Each leaf has a leading axis of the ranks, which has length 1 inside
        `shard_map`.

    Example:
        >>> tx = optax.chain(sparsejax.dgc(0.01, min_size=0), sparsejax.zen_sync())
        >>> opt_state = sparsejax.init(tx, params, mesh)
        >>> sparsejax.residuals(opt_state)["w"].shape == (4, *params["w"].shape)
        True

    See Also:
        `sparsejax.metrics`: returns the norm of the residuals, and the traffic.
        `sparsejax.summary`: returns the traffic as a table.
        `sparsejax.explain`: forecasts the traffic.
    """
    tree.check_not_donated(state, "sparsejax.residuals")
    memories = find(state, FeedbackState)
    trees = [memory.residual.value for memory in memories if memory.residual is not None]
    if memories and not trees:
        raise StateError(
            "no leaf has a residual here: each is sent whole. zen_sync, dense_sync and all "
            "that is exact leave nothing out: chain a sparsifier such as sparsejax.dgc() "
            "before them, or take a scheme that chooses, such as sparsejax.spardl_sync(). "
            "That one sends leaves below 65,536 elements whole, unless a rule "
            "{path: 'sparse'} gives it smaller ones; and with memory=None what a "
            "sparsifier leaves out is lost."
        )
    if not trees:
        raise StateError(
            "nothing with a memory has its state here; pass the optimizer's state, as "
            "tx.init or tx.update returned it, of a chain with a sparsifier such as "
            "sparsejax.dgc(), or with a scheme that chooses, such as "
            "sparsejax.spardl_sync()."
        )

    def one(*leaves):
        there = [leaf for leaf in leaves if not tree.is_masked(leaf)]
        return there[0] if there else leaves[0]

    return tree.map_leaves(one, *trees)


def metrics(state: Any) -> dict[str, jax.Array]:
    """Returns the traffic of the last synchronization and of all, as a dict of scalars.

    Keys are `sync/<leaves>/<what>` for each bucket of leaves that were exchanged together,
    and `sync/<what>` for totals. A second synchronization in the same state is `sync1`, and
    so on.

    * `wire_bytes`: the bytes that one rank sent; `payload_bytes`: those that its entries
      needed, without padding.
    * `dense_bytes`: the bytes that an all-reduce would have sent.
    * `inside_bytes`: the bytes that one rank sent inside a host, in an exchange of two
      levels, or under `jit` over axes other than the ranks'. A sparsifier or `accumulate`
      that precedes the exchange has its own, `sparsify/inside_bytes` and
      `accumulate/inside_bytes`.
    * `rounds`: the number of messages with entries that one rank sent one after another.
    * densities and imbalances: see `Traffic`.
    * `exchanges`, and bytes that begin with `total_`: since the first state, exact for a
      run of any length. Steps that `skip_nonfinite` skipped are not counted.
    * `residual_norm`, if ranks have residuals: the norm over all ranks. A sparsifier has
      `sparsify/residual_norm`, over all leaves. With `check_vma=False` the shards of a leaf
      over another mesh axis are not known, and the norm is that of the fullest shard.
    * `skip/skipped`: the number of updates that `skip_nonfinite` skipped.

    If a sparsifier selects from several buckets together, they are exchanged as one. Each
    then has a share of the bytes by its capacity, the first has the rounds, and densities
    and imbalances are those of the whole exchange. Nothing is computed or sent, so one of
    several processes may call it alone.

    Args:
        state: An optimizer state, in which transformations may be chained, masked or
            partitioned.

    Returns:
        The scalars by name.

    Example:
        >>> opt_state = sparsejax.init(tx, params, mesh)
        >>> sent = sparsejax.metrics(opt_state)["sync/wire_bytes"]

    See Also:
        `sparsejax.summary`: returns the same as a table, to be printed.
        `sparsejax.residuals`: returns the residuals of all ranks.
        `sparsejax.explain`: forecasts the same before a run.
    """
    exchanges = find(state, ExchangeState)
    if not exchanges:
        raise StateError(
            "there is no state of a sparsejax transformation in this state; pass the "
            "optimizer's state, as tx.init or tx.update returned it."
        )
    tree.check_not_donated(state, "sparsejax.metrics")
    result: dict[str, jax.Array] = {}
    syncs = sparsifiers = 0
    for feedback in find(state, FeedbackState):
        if own := find(feedback.inner, ExchangeState):
            prefix = f"sync{syncs or ''}"
            result |= _of_exchange(own[0], prefix)
            syncs += 1
        else:
            prefix = f"sparsify{sparsifiers or ''}"
            result[f"{prefix}/inside_bytes"] = tree.here(feedback.inner.inside)
            sparsifiers += 1
        if feedback.norm is not None:
            result[f"{prefix}/residual_norm"] = tree.here(feedback.norm)
    for number, held in enumerate(find(state, AccumulateState)):
        result[f"accumulate{number or ''}/inside_bytes"] = tree.here(held.inside)
    for number, skip in enumerate(find(state, SkipState)):
        result[f"skip{number or ''}/skipped"] = tree.here(skip.skipped)
    return result


def _of_exchange(state, prefix):
    """Returns the metrics of an exchange, of each bucket and in total."""
    result: dict[str, Any] = {}
    totals: dict[str, Any] = {"wire_bytes": 0.0, "payload_bytes": 0.0, "dense_bytes": 0.0}
    for name, traffic in tree.here(state.traffic).items():
        numbers = _of_traffic(Traffic.of_one(traffic))
        result |= {f"{prefix}/{name}/{key}": value for key, value in numbers.items()}
        totals = {key: total + numbers[key] for key, total in totals.items()}
    result |= {f"{prefix}/{key}": jnp.asarray(x) for key, x in totals.items()}
    return result | {f"{prefix}/{key}": x for key, x in state.totals.numbers().items()}


def _of_traffic(traffic: Traffic) -> dict[str, jax.Array]:
    return {
        "wire_bytes": traffic.wire,
        "payload_bytes": traffic.payload,
        "inside_bytes": traffic.inside,
        "dense_bytes": traffic.dense,
        "density_before": traffic.density_before,
        "density_after": traffic.density_after,
        "push_imbalance": traffic.push.imbalance,
        "pull_imbalance": traffic.pull.imbalance,
        "rounds": traffic.push.rounds + traffic.pull.rounds,
    }
